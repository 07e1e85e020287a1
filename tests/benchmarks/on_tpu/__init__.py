"""A step on a TPU by the TPU compiler's own count: see tests/benchmarks/tpu.py."""
