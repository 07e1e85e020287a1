"""What a backend has to be: one protocol for each part of it."""
