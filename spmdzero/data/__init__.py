"""Batches on their way from a dataset to the devices."""
