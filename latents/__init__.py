"""Latent shards (reading, writing, the order of training batches) and the autoencoders that make latents."""
