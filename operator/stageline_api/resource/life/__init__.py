"""The life cycle of a model's groups: restarts, rollouts, timeouts, replicas, and the status."""
