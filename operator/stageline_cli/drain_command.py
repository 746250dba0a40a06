"""`stageline drain NODE`: move every stage off a node, group by group, so that every model keeps serving.

The node is cordoned first. Then one pod of each group is evicted, which ends the whole group, and the operator creates
it again on other nodes. The API server refuses an eviction that would leave a model with fewer groups than its
PodDisruptionBudget allows; then the command waits and retries. It deletes nothing, and leaves all other pods to
`kubectl drain`.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import click

from stageline_api import labels
from stageline_api.errors import UserError
from stageline_kubernetes.errors import ApiError
from stageline_kubernetes.reader import ApiServer, log_in

_LOOK_SECONDS: Final = 1.0
_REFUSED_FOR_NOW: Final = 429
"""Status of an eviction that a PodDisruptionBudget forbids."""


class Group(NamedTuple):
    """One incarnation of a group."""

    namespace: str
    model: str
    group: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.model} group {self.group}"


@dataclass(frozen=True, slots=True)
class NodeStages:
    """The stages of a node, and evictions. All methods raise `UserError`."""

    api: ApiServer
    node: str

    def cordon(self) -> None:
        """Mark the node unschedulable."""
        patch = [{"op": "add", "path": "/spec/unschedulable", "value": True}]
        try:
            self.api.patch_json(self._node_path, patch)
        except ApiError as error:
            if error.is_not_found:
                raise UserError(f"cluster {self.api.context}: there is no node {self.node!r}") from error
            raise UserError(f"node {self.node!r} can't be cordoned: {error}") from error

    def groups(self) -> dict[Group, str]:
        """The groups with a pod on the node, each with the name of a pod that is not ending, or an empty string."""
        try:
            found = self.api.get_json(
                "/api/v1/pods", labelSelector=labels.MODEL, fieldSelector=f"spec.nodeName={self.node}"
            )["items"]
        except ApiError as error:
            raise UserError(f"the pods of node {self.node!r} can't be read: {error}") from error
        groups: dict[Group, str] = {}
        for pod in found:
            living = "" if "deletionTimestamp" in pod["metadata"] else str(pod["metadata"]["name"])
            group = _group_of(pod)
            groups[group] = groups.get(group) or living
        return groups

    def evict(self, group: Group, pod: str) -> str:
        """Request the eviction of a pod; returns why it is refused for now, or an empty string."""
        place = f"/api/v1/namespaces/{quote(group.namespace, safe='')}/pods/{quote(pod, safe='')}/eviction"
        metadata = {"name": pod, "namespace": group.namespace}
        try:
            self.api.post_json(place, {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata})
        except ApiError as error:
            if error.status == _REFUSED_FOR_NOW:
                return str(error)
            if not error.is_not_found:
                raise UserError(f"{group} can't be evicted from {self.node}: {error}") from error
        return ""

    @property
    def _node_path(self) -> str:
        return f"/api/v1/nodes/{quote(self.node, safe='')}"


@click.command()
@click.argument("node")
@click.option("--dry-run", is_flag=True, help="List groups with a stage on the node and change nothing.")
@click.option(
    "--timeout-seconds",
    type=click.FloatRange(min=1),
    default=1800.0,
    show_default=True,
    help="Maximum wait in seconds.",
)
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="As for kubectl.")
@click.option("--context", help="Context of the kubeconfig. Default: the current one.")
def drain(node: str, dry_run: bool, timeout_seconds: float, kubeconfig: Path | None, context: str | None) -> int:
    """Cordon NODE and move all stages off it, one group of a model at a time, in all namespaces.

    Running requests continue in other groups, as when a group restarts; a model with one group is unavailable while it
    starts elsewhere. If interrupted or out of time, the node stays cordoned: `kubectl uncordon NODE`.
    """
    with _logged_in(kubeconfig, context) as api:
        stages = NodeStages(api, node)
        if dry_run:
            for group in sorted(stages.groups()):
                click.echo(f"{group} has a stage on {node}")
            return 0
        stages.cordon()
        click.echo(f"{node} is cordoned")
        move_stages(stages, timeout_seconds, click.echo)
        click.echo(f"no stage is left on {node}; kubectl drain {node} moves the other pods")
    return 0


def move_stages(stages: NodeStages, timeout_seconds: float, say: Callable[[str], Any]) -> None:
    """Evict one pod of each group repeatedly until none is left; raises `UserError` after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    reported: dict[Group, str] = {}
    while left := stages.groups():
        for group, words in _ask_to_leave(stages, left, reported):
            if reported.get(group) != words:
                say(f"{group}: {words}")
            reported[group] = words
        if time.monotonic() > deadline:
            names = ", ".join(str(group) for group in sorted(left))
            raise UserError(
                f"{stages.node} still has a stage of {names} after {timeout_seconds:g} s; it stays cordoned, "
                "and started moves continue without this command"
            )
        time.sleep(_LOOK_SECONDS)


def _ask_to_leave(
    stages: NodeStages, groups: Mapping[Group, str], reported: Mapping[Group, str]
) -> Iterator[tuple[Group, str]]:
    for group in sorted(groups):
        pod = groups[group]
        if not pod or reported.get(group) == _LEAVING:
            yield group, _LEAVING
        elif refused := stages.evict(group, pod):
            yield group, f"waits: {refused}"
        else:
            yield group, _LEAVING


_LEAVING: Final = "is being moved"


def _group_of(pod: Mapping[str, Any]) -> Group:
    metadata = pod["metadata"]
    known = metadata["labels"]
    return Group(
        metadata["namespace"], known[labels.MODEL], known.get(labels.GROUP, "?"), known.get(labels.INCARNATION, "?")
    )


@contextmanager
def _logged_in(kubeconfig: Path | None, context: str | None) -> Iterator[ApiServer]:
    api = log_in(kubeconfig, context)
    try:
        yield api
    finally:
        api.close()
