"""The model and its engine: `spec.model`, `spec.engine`, `spec.parallelism`."""
