"""How a model's groups live: restarts, rollouts, timeouts, their number, and the status that tells of it."""
