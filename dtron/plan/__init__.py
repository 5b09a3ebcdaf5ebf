"""What a run needs and how fast it will be, told without a GPU; `dtron plan` prints it."""
