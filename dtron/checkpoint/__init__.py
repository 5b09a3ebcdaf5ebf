"""Saving, committing and loading checkpoints."""
