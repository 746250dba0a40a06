"""The nodes of a group and the network between its pods: `spec.placement`, `spec.network`."""
