"""Which nodes count as lost, told from the taints of all of them. Pure.

A lost node's pods are deleted without waiting for their kubelet, so a node that only looks lost must not count. The
node controller marks an unreachable node for the scheduler at once (`NoSchedule`) and gives its pods up with
`NoExecute`, which it withholds while most nodes look lost: then the network or the API server is at fault, and pods
serve on. The same rule holds here, and a node counts only when it has been given up for a while: when all kubelets
are cut off their leases lapse one after the other, so the first looks like a loss of its own.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from stageline_operator.planner.observed.container_end import moment

UNREACHABLE: Final = "node.kubernetes.io/unreachable"
OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
OUTAGE_FRACTION: Final = 0.55
"""Of the nodes: from here on their silence says nothing of them. The node controller's own default."""
FEW_NODES: Final = 2
"""So many may be lost at once in a cluster of any size that has others left."""
GIVEN_UP_SECONDS: Final = 10.0
"""Kubelets renew their leases every 10 s, so those that are cut off together lapse within as long."""
LOOK_AGAIN_SECONDS: Final = 5.0
"""How soon to reconcile again while a node is unheard of: whether it counts as lost depends on the other nodes too, and
their changes start no reconcile of this model."""

Taints = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class NodeLosses:
    """Of the nodes asked for: `lost` are dead to us, `unheard` only look so; `why` says what is waited for."""

    lost: frozenset[str] = frozenset()
    unheard: frozenset[str] = frozenset()
    why: str = ""


def is_outage(silent: int, total: int) -> bool:
    """Whether so many of all nodes are silent that the fault is not theirs."""
    return silent > 0 and (silent == total or (silent > FEW_NODES and silent >= OUTAGE_FRACTION * total))


def judge_nodes(
    asked: Collection[str], taints_of: Mapping[str, Taints], silent: int, total: int, now: datetime
) -> NodeLosses:
    """Judge the nodes asked for. Those that `taints_of` lacks are gone; `silent` of all `total` are unreachable."""
    lost = {name for name in asked if name not in taints_of or _has(taints_of[name], OUT_OF_SERVICE)}
    unreachable = {name for name in asked if name not in lost and _has(taints_of[name], UNREACHABLE)}
    if is_outage(silent, total):
        why = f"{silent} of {total} nodes can't be reached, so the fault is not theirs: no group is replaced for it"
        return NodeLosses(frozenset(lost), frozenset(unreachable), why)
    given_up = {name for name in unreachable if _is_given_up(taints_of[name], now)}
    why = "its node can't be reached; it is replaced once the control plane has given the node up for a while"
    return NodeLosses(frozenset(lost | given_up), frozenset(unreachable - given_up), why)


def is_silent(taints: Taints) -> bool:
    """Whether a node's kubelet is not heard of."""
    return _has(taints, UNREACHABLE)


def _has(taints: Taints, key: str) -> bool:
    return any(taint.get("key") == key for taint in taints)


def _is_given_up(taints: Taints, now: datetime) -> bool:
    for taint in taints:
        if taint.get("key") == UNREACHABLE and taint.get("effect") == "NoExecute":
            since = moment(taint.get("timeAdded"))
            return since is None or now - since >= timedelta(seconds=GIVEN_UP_SECONDS)
    return False
