"""Access to files and object stores, and the process that writes checkpoint files."""
