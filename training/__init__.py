"""The training loop, the trainer and the hooks between training steps."""
