"""Pallas kernels as recorded operations."""
