"""The own decoder on the CPU: attention over the slot cache, layers, head."""
