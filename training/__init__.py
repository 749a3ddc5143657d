"""The trainer, what it is built from, and what a run needs on disk."""
