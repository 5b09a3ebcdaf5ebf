"""A rank's process: rendezvous, run directory, locks, attempts and metrics."""
