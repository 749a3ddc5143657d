"""The machine: accelerate, the processes, and torch.compile."""
