"""`stageline restart` and `stageline rollback`: manual changes of a model in a cluster, as ordinary rollouts.

Both only change the spec, so the operator handles them like any change: surge and drain within `rollout`, without
interrupting requests. If a model is managed in git, change it there; the next sync would undo these commands.
"""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
import yaml

from stageline_api.errors import UserError
from stageline_api.resource.life.recorded_status import read_status
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_cli.cluster_model import ClusterModel, Revision
from stageline_cli.on_call.sources.choose_source import CLUSTER_OPTIONS
from stageline_kubernetes.reader import log_in
from stageline_operator.planner.objects.identity import SHAPELESS_FIELDS

RESTARTED_AT: Final = "kubectl.kubernetes.io/restartedAt"
"""The annotation that `kubectl rollout restart` sets on pods, so that both have one name."""
_OPTIONS: Final = (
    *CLUSTER_OPTIONS,
    click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until the model is Ready or stalls."),
    click.option(
        "--timeout-seconds",
        type=click.FloatRange(min=1),
        default=1800.0,
        show_default=True,
        help="Maximum wait in seconds.",
    ),
)


def _changes_a_model(command: Any) -> Any:
    for option in reversed(_OPTIONS):
        command = option(command)
    return click.command()(click.argument("model")(command))


@_changes_a_model
def restart(model: str, wait: bool, timeout_seconds: float, **where: Any) -> int:
    """Replace all groups of MODEL, one after another, as a rollout.

    Groups that have used up their restarts are retried too.
    """
    with _opened(model, **where) as found:
        manifest = found.read()
        if manifest["spec"].get("suspend"):
            raise UserError(f"{model} is suspended: it has no group to restart until spec.suspend is false")
        template = dict(manifest["spec"].get("template") or {})
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        template["annotations"] = {**(template.get("annotations") or {}), RESTARTED_AT: now}
        changed = found.change(manifest, {**manifest["spec"], "template": template})
        click.echo(f"{found.name}: restart of {_groups(read_status(manifest.get('status')))} begun")
        if wait:
            found.wait_ready(changed["metadata"]["generation"], timeout_seconds, _say(found))
    return 0


@_changes_a_model
@click.option("--to", "wanted", help="Target revision. Default: the newest other one that has groups.")
@click.option("--list", "is_list", is_flag=True, help="List revisions and change nothing.")
@click.option("--dry-run", is_flag=True, help="Show the difference in the spec and change nothing.")
def rollback(
    model: str, wanted: str | None, is_list: bool, dry_run: bool, wait: bool, timeout_seconds: float, **where: Any
) -> int:
    """Restore the spec of an earlier revision; groups that still have it are unchanged.

    A revision is kept as long as a group has it, so this undoes a rollout that has not ended. `replicas`, `restart`,
    `rollout` and `suspend` don't change.
    """
    with _opened(model, **where) as found:
        manifest = found.read()
        status = read_status(manifest.get("status"))
        revisions = found.revisions(status)
        if is_list:
            _list(revisions, status)
            return 0
        target = _target(revisions, status, wanted)
        policies = {name: manifest["spec"][name] for name in SHAPELESS_FIELDS if name in manifest["spec"]}
        spec = {**{name: value for name, value in target.spec.items() if name not in SHAPELESS_FIELDS}, **policies}
        click.echo(_difference(revisions, status, target))
        if dry_run:
            return 0
        changed = found.change(manifest, spec)
        click.echo(f"{found.name}: rollback to revision {target.name} begun")
        if wait:
            found.wait_ready(changed["metadata"]["generation"], timeout_seconds, _say(found))
    return 0


@contextmanager
def _opened(model: str, kubeconfig: Path | None, context: str | None, namespace: str | None) -> Iterator[ClusterModel]:
    api = log_in(kubeconfig, context)
    try:
        yield ClusterModel(api, namespace or api.namespace, model)
    finally:
        api.close()


def _target(revisions: list[Revision], status: PipelineModelStatus, wanted: str | None) -> Revision:
    others = [each for each in revisions if each.name != status.update_revision]
    known = ", ".join(each.name for each in others) or "none"
    if wanted is not None:
        chosen = next((each for each in others if each.name == wanted), None)
        if chosen is None:
            raise UserError(f"--to {wanted}: no such revision; available: {known}", 2)
        return chosen
    chosen = next((each for each in others if each.groups), None)
    if chosen is None:
        raise UserError(
            f"no group has another revision than {status.update_revision or 'the current one'}: the rollout has ended, "
            "and earlier revisions are gone; apply the older file"
        )
    return chosen


def _list(revisions: list[Revision], status: PipelineModelStatus) -> None:
    click.echo(f"{'REVISION':<14}{'CREATED':<24}GROUPS")
    for each in revisions:
        mark = "  (current)" if each.name == status.update_revision else ""
        click.echo(f"{each.name:<14}{each.created:<24}{each.groups}{mark}")


def _difference(revisions: list[Revision], status: PipelineModelStatus, target: Revision) -> str:
    """From the current revision's spec to the target's, both with the defaults of their time."""
    current = next((each for each in revisions if each.name == status.update_revision), None)
    if current is None:
        return f"the current revision's spec is missing: no comparison; the spec of {target.name} replaces it"
    names = (f"revision {current.name}", f"revision {target.name}")
    lines = difflib.unified_diff(_shown(current.spec), _shown(target.spec), *names, n=2, lineterm="")
    return "\n".join(lines)


def _shown(spec: Mapping[str, Any]) -> list[str]:
    kept = {name: value for name, value in spec.items() if name not in SHAPELESS_FIELDS}
    return yaml.safe_dump(kept, sort_keys=True).splitlines()


def _groups(status: PipelineModelStatus) -> str:
    count = len(status.groups)
    return "1 group" if count == 1 else f"{count} groups"


def _say(model: ClusterModel) -> Any:
    return lambda words: click.echo(f"{model.name}: {words}")
