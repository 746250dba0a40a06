"""Finds running models: in a cluster, or in a `stageline up` on this machine."""
