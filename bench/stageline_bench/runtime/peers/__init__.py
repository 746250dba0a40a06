"""Other engines on the same prompts and cores, each in an environment of its own."""
