"""What runs, times and reports the peers of tests/benchmarks/."""
