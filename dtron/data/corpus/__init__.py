"""A corpus on disk: readers of documents, token shards, and how they are made."""
