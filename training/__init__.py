"""The trainer and the hooks that it calls between training steps."""
