"""What a game day breaks in a cluster, and which alert must say so. `game_day` judges.

All of them break the same cluster, one after the other: SmolLM2 as two stages, installed by the chart, on two nodes of
its own. Each puts back what it broke, and waits until the cluster is whole again.
"""

from collections.abc import Iterator
from typing import Final

from boards.game_day_scenarios import Note, Scenario
from boards.watched_cluster import MODEL_NODES, MODELS, RELEASE_LABEL, WatchedCluster

QUOTA: Final = "few-pods"


def gateway_gone(broken: WatchedCluster, note: Note) -> Iterator[None]:
    """Somebody scales the gateway to nothing; no pod of it is left to scrape."""
    note("the gateway's Deployment is scaled to 0")
    broken.scale("gateway", 0)
    yield
    broken.scale("gateway", 1)
    broken.until_whole()
    note("a gateway runs again, and nothing fires")


def operator_gone(broken: WatchedCluster, note: Note) -> Iterator[None]:
    """Somebody scales the operator to nothing; the groups go on serving."""
    note("the operator's Deployment is scaled to 0")
    broken.scale("operator", 0)
    yield
    broken.scale("operator", 1)
    broken.until_whole()
    note("an operator leads again, and nothing fires")


def quota_reached(broken: WatchedCluster, note: Note) -> Iterator[None]:
    """A second group is asked for in a namespace whose quota has room for one stage more."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": QUOTA, "namespace": MODELS}}
    broken.cluster.apply({**quota, "spec": {"hard": {"count/pods": "3"}}})
    broken.model.apply(replicas=2)
    note("the namespace may hold 3 pods, and 2 groups of 2 stages are asked for")
    yield
    broken.cluster.kubectl_ok("delete", "resourcequota", QUOTA, "-n", MODELS)
    broken.model.apply(replicas=1)
    broken.until_whole()
    note("one group is asked for again, and nothing fires")


def node_lost(broken: WatchedCluster, note: Note) -> Iterator[None]:
    """The node of stage 1 loses its power, and no other takes its pod."""
    lost = broken.nodes.of_pod(broken.model.pod(stage=1))
    others = [name for name in MODEL_NODES if name != lost.name]
    broken.cluster.kubectl_ok("cordon", *others)
    lost.kill()
    note(f"{lost.name}, where stage 1 runs, loses its power; {' and '.join(others)} takes no new pods")
    yield
    broken.cluster.kubectl_ok("uncordon", *others)
    broken.nodes.recover()
    broken.until_whole()
    note("the node is back, the group is ready again, and nothing fires")


OF_MODEL: Final = {"namespace": MODELS, "model": "smollm2"}
CLUSTER_SCENARIOS: Final[tuple[Scenario[WatchedCluster], ...]] = (
    Scenario(
        "gateway-gone", "The gateway is gone", "StagelineGatewayDown", {"namespace": MODELS}, 30, gateway_gone,
        beside=frozenset(),
    ),
    Scenario(
        "operator-gone", "The operator is gone", "StagelineOperatorDown", {"release": RELEASE_LABEL}, 30,
        operator_gone, beside=frozenset(),
    ),
    Scenario(
        "quota-reached", "A quota has no room for a group", "StagelineStagePending",
        {**OF_MODEL, "group": "1", "stage": "1"}, 30, quota_reached, beside=frozenset(),
    ),
    Scenario(
        "node-lost", "A node is lost, and no other has room", "StagelineNoReadyGroup",
        {"namespace": MODELS, "model_name": "smollm2"}, 60, node_lost, beside=frozenset(),
    ),
)  # fmt: skip
