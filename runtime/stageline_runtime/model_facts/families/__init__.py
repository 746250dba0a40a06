"""A file for each model family of the own decoder: how its config is read, and what its layers consist of."""
