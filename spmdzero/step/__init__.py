"""A ZeRO step: what a micro-batch adds up, and what the boundary makes of it."""
