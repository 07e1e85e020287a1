"""How an object finds its renderer."""
