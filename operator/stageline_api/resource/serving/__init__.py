"""What is served, and by what: `spec.model`, `spec.engine`, `spec.parallelism`."""
