"""Read and write latent shards, order them into training batches, and load the autoencoders that make latents."""
