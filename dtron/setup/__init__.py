"""What a run will be, and whether it can: rules, this machine, float8, agreement of ranks."""
