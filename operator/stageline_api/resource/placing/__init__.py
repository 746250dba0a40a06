"""Which nodes a group is on and how its pods talk: `spec.placement`, `spec.network`."""
