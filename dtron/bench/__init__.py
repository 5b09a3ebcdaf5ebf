"""Benchmarks: sweeps over settings, comparison with torchtitan, single kernels, and a breakdown of
the step time. See `dtron bench --help` and docs/benchmarking.md."""
