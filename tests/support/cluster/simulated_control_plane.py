"""A control plane that may lag, and an operator that may crash: what the planner meets outside of plain walks.

Nodes hold one stage pod each. Observations are snapshots that may be old but never go back; a pass writes the status,
then deletes, then applies, and may end between any two writes. A status is only written over the one that was read.
Pods end when the simulation says so; those of a lost node only when they are deleted without waiting.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from cluster.cached_observation import observe_through_cache
from cluster.planned_cluster import SETTING, START, is_over
from stageline_api import labels
from stageline_api.failures import FailureClass
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.observed.node_losses import UNREACHABLE, Taints, is_outage
from stageline_operator.planner.plan import plan
from stageline_operator.planner.types import ObjectKey, Plan, PodRefusal

EVICTION_SECONDS: Final = 300.0
"""After which the control plane deletes the pods of a node that is lost."""
SCHEDULER_WORDS: Final = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."


@dataclass
class Snapshot:
    """What could be observed at one moment."""

    objects: dict[ObjectKey, dict[str, Any]] = field(default_factory=dict)
    lost_nodes: frozenset[str] = frozenset()
    """Silent or gone."""
    nodes: frozenset[str] = frozenset()
    """Those that are not gone."""
    silent_since: Mapping[str, datetime] = field(default_factory=dict)

    def taints(self) -> dict[str, Taints]:
        """Of every node that is not gone; the node controller withholds `NoExecute` in an outage."""
        silent = self.lost_nodes & self.nodes
        effect = "NoSchedule" if is_outage(len(silent), len(self.nodes)) else "NoExecute"

        def taint(node: str) -> dict[str, str]:
            return {"key": UNREACHABLE, "effect": effect, "timeAdded": self.silent_since[node].isoformat()}

        return {node: [taint(node)] if node in silent else [] for node in self.nodes}

    @property
    def pods(self) -> dict[str, dict[str, Any]]:
        return {name: each for (kind, name), each in self.objects.items() if kind == "Pod"}

    def serving(self, status: PipelineModelStatus) -> set[int]:
        """Groups on record whose every stage is ready, alive and of the incarnation on record."""
        counts: dict[int, int] = {}
        incarnation_of = self.incarnations() | {group.index: group.incarnation for group in status.groups}
        for pod in self.pods.values():
            own = pod["metadata"]["labels"]
            group = int(own[labels.GROUP])
            if int(own[labels.INCARNATION]) == incarnation_of.get(group) and self._is_alive(pod):
                counts[group] = counts.get(group, 0) + 1
        return {group for group, count in counts.items() if count == 2}

    def incarnations(self) -> dict[int, int]:
        """Incarnations of groups as their pods show them, for those that are not on record."""
        own = [pod["metadata"]["labels"] for pod in self.pods.values()]
        lives = sorted((int(each[labels.GROUP]), int(each[labels.INCARNATION])) for each in own)
        return dict(lives)

    def _is_alive(self, pod: dict[str, Any]) -> bool:
        ended = any("terminated" in each["state"] for each in pod["status"]["containerStatuses"])
        gone = "deletionTimestamp" in pod["metadata"] or pod["spec"].get("nodeName") in self.lost_nodes
        return is_ready(pod) and not ended and not gone


def _frozen(pod: dict[str, Any]) -> dict[str, Any]:
    """A copy of what may change about a pod."""
    containers = [dict(each) for each in pod["status"]["containerStatuses"]]
    status = {**pod["status"], "containerStatuses": containers}
    return {**pod, "metadata": dict(pod["metadata"]), "spec": dict(pod["spec"]), "status": status}


def is_ready(pod: dict[str, Any]) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"]["conditions"])


class SimulatedControlPlane:
    """The store, the nodes, the clock and the operator's passes."""

    def __init__(self, model: PipelineModel, num_nodes: int = 4, sees_nodes: bool = True) -> None:
        self.model = model
        self.sees_nodes = sees_nodes
        """Whether the operator may look at nodes; if not, it has to tell a lost one from its pods."""
        self.quota = 1000
        """Pods that the namespace has room for."""
        self.refused: dict[str, PodRefusal] = {}
        self._lost_at: dict[str, datetime] = {}
        self.now: datetime = START
        self.status = PipelineModelStatus()
        self.truth = Snapshot()
        self.history: list[Snapshot] = [Snapshot()]
        self.seen = 0
        """Index of the newest snapshot that was observed: none before it is observed again."""
        self.nodes = [f"node-{number}" for number in range(num_nodes)]
        self.highest: dict[int, int] = {}
        """Highest incarnation of each group that ever had a pod."""

    def observe(self, lag: int) -> Snapshot:
        """The snapshot `lag` changes ago, or the oldest that may still be shown."""
        self.seen = max(self.seen, len(self.history) - 1 - lag)
        return self.history[self.seen]

    def run_pass(self, lag: int = 0, crash_after: int | None = None) -> tuple[Plan, Snapshot, PipelineModelStatus]:
        """One pass; with `crash_after` only that many of its writes happen. Returns what it planned and from what."""
        shown, before = self.observe(lag), self.status
        taints = shown.taints() if self.sees_nodes else None
        observed = replace(
            observe_through_cache(self.model, shown.objects, before, self.now, taints_of_nodes=taints),
            refused_pods=dict(self.refused),
        )
        planned = plan(self.model, observed, self.now, "token", SETTING)
        for count, write in enumerate(self._writes(planned)):
            if crash_after is not None and count >= crash_after:
                break
            write()
            self.changed()
        return planned, shown, before

    def _writes(self, planned: Plan) -> Iterator[Any]:
        yield lambda: self._write_status(planned.status)
        for deletion in planned.delete:
            yield lambda each=deletion: self._delete((each.kind, each.name), each.grace_seconds)
        for manifest in sorted(planned.apply, key=lambda each: each["kind"] == "Pod"):
            yield lambda each=manifest: self._apply(each)

    def changed(self) -> None:
        """Something is different from now on; what came long before can't be shown any more."""
        objects = {key: _frozen(each) if key[0] == "Pod" else each for key, each in self.truth.objects.items()}
        known = self.truth.lost_nodes, frozenset(self.nodes), dict(self._lost_at)
        self.history.append(Snapshot(objects, *known))
        dropped = max(0, len(self.history) - 5)
        self.history = self.history[dropped:]
        self.seen = max(0, self.seen - dropped)

    def _write_status(self, status: PipelineModelStatus) -> None:
        self.status = PipelineModelStatus.model_validate(status.to_manifest())

    def _delete(self, key: ObjectKey, grace_seconds: float | None) -> None:
        found = self.truth.objects.get(key)
        if found is None:
            return
        if key[0] != "Pod" or grace_seconds == 0.0:
            del self.truth.objects[key]
        else:
            found["metadata"].setdefault("deletionTimestamp", self.now.isoformat())

    def _apply(self, manifest: dict[str, Any]) -> None:
        key = (manifest["kind"], manifest["metadata"]["name"])
        if key[0] != "Pod":
            self.truth.objects[key] = manifest
            return
        if key in self.truth.objects:
            return  # the one that is there is the same pod
        if len(self.truth.pods) >= self.quota:
            since = self.refused[key[1]].since if key[1] in self.refused else self.now
            retry_at = self.now + timedelta(seconds=2)
            self.refused[key[1]] = PodRefusal(FailureClass.QUOTA_EXCEEDED, "exceeded quota", since, retry_at)
            return
        self.refused.pop(key[1], None)
        own = manifest["metadata"]["labels"]
        group, incarnation = int(own[labels.GROUP]), int(own[labels.INCARNATION])
        on_record = {each.index: each.incarnation for each in self.status.groups}
        assert on_record.get(group) == incarnation, f"{key[1]} is made but not on record: {self.status}"
        assert incarnation >= self.highest.get(group, 0), f"{key[1]} is of a life that is over: {self.highest}"
        self.highest[group] = incarnation
        pod = manifest | {"metadata": dict(manifest["metadata"]), "spec": dict(manifest["spec"])}
        pod["status"] = {
            "phase": "Pending",
            "conditions": [],
            "containerStatuses": [
                {"name": c["name"], "ready": False, "state": {"waiting": {"reason": "ContainerCreating"}}}
                for c in pod["spec"]["containers"]
            ],
        }
        pod["status"]["conditions"] = [_scheduled("False", self.now)]
        self.truth.objects[key] = pod

    def lose_status(self, group: int | None = None) -> None:
        """Somebody restores a backup: all of the status is gone, or the entry of one group can't be read."""
        kept = tuple(each for each in self.status.groups if each.index != group)
        self.status = PipelineModelStatus() if group is None else self.status.model_copy(update={"groups": kept})
        self._forget_lives()

    def _forget_lives(self) -> None:
        """A life is known by its pods, by its group's record, or by the highest that ended; else nobody knows of it."""
        lives = [*self.truth.incarnations().items(), *((each.index, each.incarnation) for each in self.status.groups)]
        known = dict(sorted(lives))
        ended = self.status.retired_incarnation
        self.highest = {
            group: life if life <= ended else min(life, known[group])
            for group, life in self.highest.items()
            if life <= ended or group in known
        }

    # What the rest of the cluster does.

    def schedule(self) -> None:
        """Place pending pods, in the order of their names, while nodes are free."""
        running = (pod for pod in self.truth.pods.values() if not is_over(pod))
        taken = {pod["spec"].get("nodeName") for pod in running} | self.truth.lost_nodes
        free = [node for node in self.nodes if node not in taken]
        for name in sorted(self.truth.pods):
            pod = self.truth.pods[name]
            if free and "nodeName" not in pod["spec"] and "deletionTimestamp" not in pod["metadata"]:
                pod["spec"]["nodeName"] = free.pop(0)
                pod["status"]["conditions"] = [_scheduled("True", self.now)]
                for each in pod["status"]["containerStatuses"]:
                    each["state"] = {"running": {}}
        self.changed()

    def make_ready(self) -> None:
        """Whole groups become ready: a stage is ready only when all are."""
        for group in {(p["metadata"]["labels"][labels.GROUP]) for p in self.truth.pods.values()}:
            of_group = [p for p in self.truth.pods.values() if p["metadata"]["labels"][labels.GROUP] == group]
            own = [p for p in of_group if not is_over(p)]
            running = [p for p in own if all("running" in c["state"] for c in p["status"]["containerStatuses"])]
            if len(running) == len(own) == 2 and not any(self._is_silent(pod) for pod in own):
                for pod in own:
                    pod["status"]["conditions"] = [_scheduled("True", self.now), *self._readiness(True, True)]
        self.changed()

    def end(self, name: str, exit_code: int) -> None:
        """Every container of a pod ends."""
        pod = self.truth.pods[name]
        if pod["spec"].get("nodeName") is None or self._is_silent(pod):
            return
        for each in pod["status"]["containerStatuses"]:
            each["state"] = {"terminated": {"exitCode": exit_code, "finishedAt": self.now.isoformat()}}
        pod["status"]["phase"] = "Failed" if exit_code else "Succeeded"
        pod["status"]["conditions"] = [_scheduled("True", self.now), *self._readiness(False, False)]
        self.changed()

    def refuse_image(self, name: str) -> None:
        for each in self.truth.pods[name]["status"]["containerStatuses"]:
            each["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
        self.changed()

    def remove(self, name: str) -> None:
        """Somebody removes a pod by force."""
        del self.truth.objects[("Pod", name)]
        self._forget_lives()
        self.changed()

    def evict(self, name: str) -> None:
        """Somebody deletes a pod and lets it drain."""
        self.truth.pods[name]["metadata"].setdefault("deletionTimestamp", self.now.isoformat())
        self.changed()

    def finish_deletions(self) -> None:
        """Kubelets confirm that pods which are being deleted have ended; a lost one confirms nothing."""
        for name, pod in list(self.truth.pods.items()):
            if "deletionTimestamp" in pod["metadata"] and pod["spec"].get("nodeName") not in self.truth.lost_nodes:
                del self.truth.objects[("Pod", name)]
        self._forget_lives()
        self.changed()

    def lose(self, node: str) -> None:
        """The kubelet falls silent. The node controller takes its pods' readiness, and theirs alone, away."""
        self.truth.lost_nodes |= {node}
        self._lost_at.setdefault(node, self.now)
        for pod in self.truth.pods.values():
            if pod["spec"].get("nodeName") == node and is_ready(pod):
                pod["status"]["conditions"] = [_scheduled("True", self.now), *self._readiness(False, True)]
        self.changed()

    def _is_silent(self, pod: dict[str, Any]) -> bool:
        return pod["spec"].get("nodeName") in self.truth.lost_nodes

    def _readiness(self, ready: bool, containers_ready: bool) -> list[dict[str, str]]:
        told = {"Ready": ready, "ContainersReady": containers_ready}
        since = self.now.isoformat()
        return [{"type": kind, "status": str(holds), "lastTransitionTime": since} for kind, holds in told.items()]

    def heal(self) -> None:
        """All nodes come back, with a new name each, so that none of their old pods does."""
        self.nodes = [f"{node}x" if node in self.truth.lost_nodes else node for node in self.nodes]
        self.changed()

    def advance(self, seconds: float) -> None:
        """Time goes on; pods of a node that is lost for long are deleted, which nobody confirms.

        Not while most nodes are silent: the node controller takes that for a fault that isn't theirs.
        """
        self.now += timedelta(seconds=seconds)
        silent = self.truth.lost_nodes & set(self.nodes)
        withheld = silent if is_outage(len(silent), len(self.nodes)) else set()
        for pod in self.truth.pods.values():
            node = pod["spec"].get("nodeName", "")
            lost_at = self._lost_at.get(node)
            is_over = lost_at is not None and self.now >= lost_at + timedelta(seconds=EVICTION_SECONDS)
            if is_over and node not in withheld:
                self._evict_for_its_node(pod)
        self.changed()

    def _evict_for_its_node(self, pod: dict[str, Any]) -> None:
        pod["metadata"].setdefault("deletionTimestamp", self.now.isoformat())
        others = [each for each in pod["status"]["conditions"] if each["type"] != "DisruptionTarget"]
        why = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        pod["status"]["conditions"] = [*others, why]


def _scheduled(status: str, since: datetime) -> dict[str, str]:
    condition = {"type": "PodScheduled", "status": status, "lastTransitionTime": since.isoformat()}
    return condition if status == "True" else condition | {"reason": "Unschedulable", "message": SCHEDULER_WORDS}
