"""Training of a run: trainer, step, loss, optimizer, evaluation and logs."""
