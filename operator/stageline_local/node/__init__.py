"""The process node: pod manifests run as local processes, the way a kubelet runs them."""
