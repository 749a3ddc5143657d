"""The trainer and what a run needs on disk. It knows nothing of how its objects were built."""
