"""Weights of other projects as runs of ours."""
