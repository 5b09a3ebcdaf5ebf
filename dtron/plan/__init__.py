"""Estimates of a run's memory and speed, made without a GPU; `dtron plan` prints them."""
