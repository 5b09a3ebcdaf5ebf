"""Low-rank adapters (LoRA): adapters of linear layers and experts, and PEFT's files."""
