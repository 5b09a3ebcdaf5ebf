"""Documents that are not lines of text: Megatron-Core's files, and objects of the user."""
