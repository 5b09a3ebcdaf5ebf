"""The trainer, its step, loss and optimizer."""
