"""Weights in and out: networks that others published become runs, and checkpoints become folders that others load."""
