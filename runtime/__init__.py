"""Set up accelerate, coordinate processes, and compile networks with torch.compile."""
