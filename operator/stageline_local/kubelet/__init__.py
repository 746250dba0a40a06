"""The process node as a cluster's kubelet: pods that the real scheduler binds to its node run as local processes."""
