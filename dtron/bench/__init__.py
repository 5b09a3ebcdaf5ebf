"""What measures speed: sweeps over a run's settings, other frameworks beside it, kernels alone, and
where the time of a step goes. `dtron bench --help`; docs/benchmarking.md."""
