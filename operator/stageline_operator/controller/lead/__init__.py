"""Leader election: at most one replica acts."""
