"""`dtron bench lr`: a learning-rate range test."""
