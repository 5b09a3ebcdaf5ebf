"""Data parallelism: FSDP2, its collectives and its private names."""
