"""What the training loop leans on: configuration, randomness, EMA, checkpoints, run folders and sampling."""
