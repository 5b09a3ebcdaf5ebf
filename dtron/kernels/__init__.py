"""Triton kernels and custom operators; each file documents what its operators compute."""
