"""Checks before a run starts: rules, machine, float8 layers, resuming, agreement of ranks."""
