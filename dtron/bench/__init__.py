"""Benchmarks: sweeps over a run's settings, other frameworks, single kernels, and a step's time by
part. See `dtron bench --help` and docs/benchmarking.md."""
