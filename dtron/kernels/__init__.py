"""Triton and custom-op kernels; each file defines one operator and documents what it computes."""
