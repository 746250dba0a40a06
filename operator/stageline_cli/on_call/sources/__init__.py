"""Where running models are found: a cluster, or `stageline up` on this machine."""
