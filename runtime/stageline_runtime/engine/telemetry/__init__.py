"""What the engine counts, times and traces."""
