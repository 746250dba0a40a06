"""The operator's cache of the cluster, and the observed state that it gives the planner."""
