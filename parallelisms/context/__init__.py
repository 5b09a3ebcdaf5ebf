"""Context parallelism: attention over sequences that are sharded over ranks."""
