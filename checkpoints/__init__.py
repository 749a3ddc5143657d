"""What a run is on disk: the format of its checkpoints, its folder, and what a command finds there."""
