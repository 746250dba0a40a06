"""What the operator knows of the cluster, and what it tells the planner of one model."""
