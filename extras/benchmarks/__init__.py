"""How long steps, batches of latents, samples and evaluations take: `python -m extras.benchmarks`."""
