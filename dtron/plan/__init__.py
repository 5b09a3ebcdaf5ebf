"""What a run needs and how fast it will be, estimated without a GPU; `dtron plan` prints it."""
