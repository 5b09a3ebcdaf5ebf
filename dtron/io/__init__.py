"""Files, object stores and the process that writes checkpoint files."""
