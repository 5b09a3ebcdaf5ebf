"""`dtron eval` and `dtron generate`: use trained weights."""
