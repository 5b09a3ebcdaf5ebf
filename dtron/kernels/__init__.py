"""Triton and custom-op kernels; each file holds one operator and says what it computes."""
