"""The cost of metrics, tracing and timelines for their processes."""
