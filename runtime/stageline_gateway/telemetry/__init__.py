"""What the gateway counts, times and traces."""
