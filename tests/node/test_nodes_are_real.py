"""What the other tests stand on: two nodes that run containers, reach each other, and resolve names."""

from node.real_cluster import RealCluster


def test_the_nodes_are_ready(real: RealCluster) -> None:
    assert all(real.is_ready(node) for node in real.nodes)
