"""Other engines on the same prompts and cores, each in its own environment."""
