"""This package reads and writes latent shards, determines the order of training batches, and loads autoencoders."""
