"""Tensors that the devices of a replica share, and where devices stand."""
