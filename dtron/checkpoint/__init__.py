"""Save, commit and load checkpoints."""
