"""A run on disk: its folder, the format of its checkpoints, and how commands find and load them."""
