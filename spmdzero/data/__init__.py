"""Batches on their way from a dataset to the devices."""

from spmdzero.data._lengths import PadToLengths

__all__ = ["PadToLengths"]
