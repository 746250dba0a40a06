"""Decides from the taints of all nodes which of them count as lost. Pure.

A lost node's pods are deleted without waiting for their kubelet, so a wrong verdict must be avoided. The node
controller taints an unreachable node with `NoSchedule` at once, and evicts its pods with `NoExecute` later. It
withholds `NoExecute` while most nodes look lost: then the network or the API server is the cause, and the pods keep
serving. The same rule applies here. In addition, a node counts as lost only some time after `NoExecute`: if all
kubelets are cut off, their leases lapse one after another, and the first one looks like a single loss.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from stageline_operator.planner.observed.container_end import moment

UNREACHABLE: Final = "node.kubernetes.io/unreachable"
OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
OUTAGE_FRACTION: Final = 0.55
"""Fraction of unreachable nodes from which the cause is an outage. The node controller's default."""
FEW_NODES: Final = 2
"""So many nodes may be lost at once in a cluster of any size, if others remain."""
GIVEN_UP_SECONDS: Final = 10.0
"""Kubelets renew their leases every 10 s, so nodes that are cut off together lapse within that time."""
LOOK_AGAIN_SECONDS: Final = 5.0
"""Requeue interval while a node is unreachable. The verdict depends on the other nodes too, whose changes start no
reconcile of this model.
"""

Taints = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class NodeLosses:
    """Verdict on nodes: `lost` are gone, `unheard` only look so; `why` says what the verdict waits for."""

    lost: frozenset[str] = frozenset()
    unheard: frozenset[str] = frozenset()
    why: str = ""


def is_outage(silent: int, total: int) -> bool:
    """Whether so many nodes are unreachable that the nodes are not the cause."""
    return silent > 0 and (silent == total or (silent > FEW_NODES and silent >= OUTAGE_FRACTION * total))


def judge_nodes(
    asked: Collection[str], taints_of: Mapping[str, Taints], silent: int, total: int, now: datetime
) -> NodeLosses:
    """Judge the nodes asked for. Nodes missing in `taints_of` are gone; `silent` of all `total` are unreachable."""
    lost = {name for name in asked if name not in taints_of or _has(taints_of[name], OUT_OF_SERVICE)}
    unreachable = {name for name in asked if name not in lost and _has(taints_of[name], UNREACHABLE)}
    if is_outage(silent, total):
        why = f"{silent} of {total} nodes can't be reached, which looks like an outage: no group is replaced"
        return NodeLosses(frozenset(lost), frozenset(unreachable), why)
    given_up = {name for name in unreachable if _is_given_up(taints_of[name], now)}
    why = "its node can't be reached; it is replaced once the control plane has given the node up for a while"
    return NodeLosses(frozenset(lost | given_up), frozenset(unreachable - given_up), why)


def is_silent(taints: Taints) -> bool:
    """Whether a node's kubelet is unreachable."""
    return _has(taints, UNREACHABLE)


def _has(taints: Taints, key: str) -> bool:
    return any(taint.get("key") == key for taint in taints)


def _is_given_up(taints: Taints, now: datetime) -> bool:
    for taint in taints:
        if taint.get("key") == UNREACHABLE and taint.get("effect") == "NoExecute":
            since = moment(taint.get("timeAdded"))
            return since is None or now - since >= timedelta(seconds=GIVEN_UP_SECONDS)
    return False
