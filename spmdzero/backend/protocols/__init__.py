"""The protocols that a backend keeps: one for each part of it."""
