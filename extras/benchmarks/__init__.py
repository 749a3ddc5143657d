"""Measurements, each rerun by one command."""
