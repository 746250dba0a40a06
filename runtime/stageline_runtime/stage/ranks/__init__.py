"""A stage of several ranks: the supervisor that is the container's process, and the rank processes that it starts."""
