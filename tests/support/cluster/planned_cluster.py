"""A cluster that does exactly what plans say, in virtual time: the other half of a planner's tests."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from cluster.cached_observation import observe_through_cache
from stageline_api import labels
from stageline_api.failures import FailureClass, TerminationMessage
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects.cache_claims import CLAIM
from stageline_operator.planner.plan import plan
from stageline_operator.planner.types import (
    ObjectKey,
    Observed,
    Plan,
    PodRefusal,
    PodTrouble,
    Setting,
    VllmImages,
    kind_of,
)

SETTING = Setting(default_image="stageline:test")
START = datetime(2026, 1, 1, tzinfo=UTC)


def tiny_model(generation: int | None = 1, deleted: bool = False, **spec: Any) -> PipelineModel:
    """A model of two stages; `spec` replaces top-level spec fields."""
    metadata: dict[str, Any] = {"name": "tiny", "uid": "u-1"}
    if generation is not None:
        metadata["generation"] = generation
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return PipelineModel.model_validate(
        {
            "apiVersion": "stageline.dev/v1alpha1",
            "kind": "PipelineModel",
            "metadata": metadata,
            "spec": {"model": {"source": "file:///models/tiny"}, "parallelism": {"pipeline": 2}} | spec,
        }
    )


def is_over(pod: dict[str, Any]) -> bool:
    """Whether only its kubelet's clearing away keeps a pod that is being deleted."""
    return "deletionTimestamp" in pod["metadata"] and pod["status"].get("phase") in ("Succeeded", "Failed")


class PlannedCluster:
    """Holds objects and a status; `step` runs one observe, plan, apply. Deletions complete at once unless held."""

    def __init__(self, model: PipelineModel) -> None:
        self.model = model
        self.now = START
        self.status = PipelineModelStatus()
        self.objects: dict[ObjectKey, dict[str, Any]] = {}
        self.owned: dict[ObjectKey, dict[str, Any]] = {}
        """What the operator owns of objects, as fieldsV1; of those that aren't here nobody knows."""
        self.troubles: dict[str, PodTrouble] = {}
        """What kubelets say of pods, by name."""
        self.quota: Callable[[], bool] = lambda: True
        """Whether the namespace has room for another pod."""
        self.refused: dict[str, PodRefusal] = {}
        self.unchangeable: set[ObjectKey] = set()
        """Claims that were to become what they can't become."""
        self.events: list[str] = []
        self.holds_deletions = False
        self.lost_nodes: set[str] = set()
        self.unheard_nodes: set[str] = set()
        self.sees_nodes = True
        self.default_image = SETTING.default_image
        self.vllm_images = VllmImages()

    @property
    def pods(self) -> dict[str, dict[str, Any]]:
        return {name: each for (kind, name), each in self.objects.items() if kind == "Pod"}

    def observe(self) -> Observed:
        """What the operator would see of all this, through its own cache."""
        seen = observe_through_cache(
            self.model, self.objects, self.status, self.now, owned=self.owned, troubles=self.troubles
        )
        return replace(
            seen,
            refused_pods=dict(self.refused),
            lost_nodes=frozenset(self.lost_nodes),
            unheard_nodes=frozenset(self.unheard_nodes),
            unheard_why="3 of 4 nodes can't be reached" if self.unheard_nodes else "",
            sees_nodes=self.sees_nodes,
            unchangeable=frozenset(self.unchangeable),
        )

    def step(self, token: str = "t") -> Plan:
        observed = self.observe()
        planned = plan(self.model, observed, self.now, token, Setting(self.default_image, self.vllm_images))
        self.status = PipelineModelStatus.model_validate(planned.status.to_manifest())
        self.events += [event.reason for event in planned.events]
        self.unchangeable.clear()
        held: set[int] = set()
        for deletion in planned.delete:
            held |= planned.needed_by.get((deletion.kind, deletion.name), frozenset())
            if self.holds_deletions and deletion.kind == "Pod" and deletion.grace_seconds != 0.0:
                self.objects[("Pod", deletion.name)]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            else:
                self.objects.pop((deletion.kind, deletion.name), None)
        for each in planned.apply:
            key = (kind_of(each), each["metadata"]["name"])
            if each["kind"] == CLAIM and self.objects.get(key, each)["spec"] != each["spec"]:
                self.unchangeable.add(key)
                held |= planned.needed_by[key]
                continue
            if each["kind"] == "Pod" and int(each["metadata"]["labels"][labels.GROUP]) in held:
                continue
            if each["kind"] == "Pod":
                assert key not in self.objects, f"{key} was applied although it is there"
                self._assert_on_record(each, observed.status)
                if not self.quota():
                    self._refuse(key[1])
                    continue
                self.refused.pop(key[1], None)
                each = {**each, "status": self._running_status(each)}
            self.objects[key] = each
        return planned

    def _assert_on_record(self, pod: dict[str, Any], before: PipelineModelStatus) -> None:
        own = pod["metadata"]["labels"]
        on_record = [g.incarnation for g in before.groups if str(g.index) == own[labels.GROUP]]
        assert [str(incarnation) for incarnation in on_record] == [own[labels.INCARNATION]], (own, before)

    def _refuse(self, name: str) -> None:
        since = self.refused[name].since if name in self.refused else self.now
        retry_at = self.now + timedelta(seconds=10)
        self.refused[name] = PodRefusal(FailureClass.QUOTA_EXCEEDED, "exceeded quota: pods", since, retry_at)

    def settle(self, limit: int = 50) -> None:
        """Step until nothing changes without the passing of time."""
        for _ in range(limit):
            before = (self.status, sorted(self.objects))
            planned = self.step()
            if before == (self.status, sorted(self.objects)) and planned.requeue_after_seconds != 0.0:
                return
        raise AssertionError(f"still changing after {limit} steps: {self.status}")

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def _running_status(self, pod: dict[str, Any]) -> dict[str, Any]:
        return {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "False"}],
            "containerStatuses": [
                {"name": c["name"], "ready": False, "state": {"running": {}}} for c in pod["spec"]["containers"]
            ],
        }

    def pod(self, stage: int, group: int = 0) -> dict[str, Any]:
        wanted = {labels.STAGE: str(stage), labels.GROUP: str(group)}
        of_stage = [p for p in self.pods.values() if wanted.items() <= p["metadata"]["labels"].items()]
        found = [p for p in of_stage if not is_over(p)] or of_stage
        assert len(found) == 1, f"stage {stage} of group {group}: {sorted(self.pods)}"
        return found[0]

    def make_ready(self, ready: bool = True) -> None:
        for pod in self.pods.values():
            pod["status"]["conditions"] = [{"type": "Ready", "status": str(ready)}]

    def end_container(
        self,
        stage: int,
        exit_code: int,
        words: TerminationMessage | str = "",
        container: str = "stage",
        group: int = 0,
        at_seconds: float = 0.0,
        reason: str = "Error",
    ) -> None:
        """End a container `at_seconds` from now."""
        text = words if isinstance(words, str) else words.model_dump_json()
        finished = (self.now + timedelta(seconds=at_seconds)).isoformat()
        ended = {"exitCode": exit_code, "reason": reason, "message": text, "finishedAt": finished}
        for each in self.pod(stage, group)["status"]["containerStatuses"]:
            if each["name"] == container:
                each["state"] = {"terminated": ended}
        self._let_pod_end(self.pod(stage, group))

    @staticmethod
    def _let_pod_end(pod: dict[str, Any]) -> None:
        """As a kubelet does once all containers have ended for good."""
        states = [each["state"] for each in pod["status"]["containerStatuses"]]
        if all("terminated" in state for state in states):
            failed = any(state["terminated"]["exitCode"] for state in states)
            pod["status"]["phase"] = "Failed" if failed else "Succeeded"

    def phase(self, group: int = 0) -> str:
        return self.status.groups[group].phase

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(each for each in self.status.conditions if each.type == kind)
        return found.status, found.reason

    def condition_message(self, kind: str) -> str:
        return next(each for each in self.status.conditions if each.type == kind).message
