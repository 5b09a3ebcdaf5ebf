"""Data parallelism: FSDP2 with custom collectives, and all uses of its private attributes."""
