"""Data parallelism: FSDP2, custom collectives for it, and its private attributes."""
