"""The trainer, and the hooks between its steps."""
