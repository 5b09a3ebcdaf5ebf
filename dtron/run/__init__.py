"""A rank's process and its run directory."""
