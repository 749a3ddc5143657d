"""Run folders, the checkpoint format, and functions that find and load checkpoints."""
