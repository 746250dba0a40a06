"""Selects the machine or cluster for a command, and defines the options.

The default is this machine if a `stageline up` runs here, else the cluster of kubectl's current context. The heading of
every output names it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_cli.on_call.sources.local_source import LocalSource
from stageline_cli.on_call.sources.source import ModelObjects, Source
from stageline_kubernetes.places import has_kubeconfig, is_in_cluster
from stageline_local.session.instance import default_state_root

Command = TypeVar("Command", bound=Callable[..., Any])

CLUSTER_OPTIONS: Final = (
    click.option("--kubeconfig", type=click.Path(path_type=Path), help="As for kubectl."),
    click.option("--context", help="Context of the kubeconfig. Default: the current one."),
    click.option("-n", "--namespace", help="Default: the context's own."),
)
"""The cluster, with kubectl's options."""
_OPTIONS: Final = (
    click.option("--local", is_flag=True, help="Use the `stageline up` of this machine."),
    click.option("--cluster", is_flag=True, help="Use a cluster, even if a model is up on this machine."),
    click.option(
        "--state-dir", type=click.Path(path_type=Path), help="As given to `up`. Default: ~/.local/state/stageline."
    ),
    *CLUSTER_OPTIONS,
    click.option("-A", "--all-namespaces", is_flag=True, help="All namespaces."),
    click.option(
        "--reach",
        type=click.Choice(["proxy", "direct"]),
        help="How to reach a cluster's pods: through the API server (default on a laptop), or at their addresses "
        "(default inside a cluster).",
    ),
)


def source_options(command: Command) -> Command:
    """The options that select the source, as keyword arguments for `open_source`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@contextmanager
def open_source(
    *,
    local: bool,
    cluster: bool,
    state_dir: Path | None,
    kubeconfig: Path | None,
    context: str | None,
    namespace: str | None,
    all_namespaces: bool,
    reach: str | None,
) -> Iterator[Source]:
    """The source that the options name; raises `UserError` if they contradict or find nothing."""
    names_cluster = cluster or all_namespaces or any(each is not None for each in (kubeconfig, context, namespace))
    names_machine = local or state_dir is not None
    if names_cluster and names_machine:
        raise click.UsageError("--local and --state-dir mean this machine, the others a cluster: give one or the other")
    if namespace is not None and all_namespaces:
        raise click.UsageError("--namespace and --all-namespaces exclude each other")
    here = LocalSource(state_dir or default_state_root())
    if names_machine or (not names_cluster and (here.models(None) or not (has_kubeconfig() or is_in_cluster()))):
        source: Source = here
    else:
        here.close()
        source = _cluster(kubeconfig, context, namespace, all_namespaces, reach)
    try:
        yield source
    finally:
        source.close()


def one_model(source: Source, name: str | None) -> ModelObjects:
    """The model of that name, or the only one; raises `UserError` with the available names."""
    found = source.models(name)
    if len(found) == 1:
        return found[0]
    if not found:
        what = "no model" if name is None else f"no model {name!r}"
        known = ", ".join(one.name for one in source.models(None))
        raise UserError(f"{source.where}: there is {what}" + (f"; there are {known}" if known else ""))
    names = ", ".join(f"{one.namespace}/{one.name}" for one in found)
    choose = "name one" if name is None else "give its --namespace"
    raise UserError(f"{source.where}: several models ({names}): {choose}", USAGE_EXIT_CODE)


def _cluster(
    kubeconfig: Path | None, context: str | None, namespace: str | None, all_namespaces: bool, reach: str | None
) -> Source:
    # The Kubernetes client is slow to import, and a machine without a cluster need not have it.
    from stageline_cli.on_call.sources.cluster_source import ClusterSource, Reach
    from stageline_kubernetes.reader import log_in

    api = log_in(kubeconfig, context)
    way = Reach(reach) if reach is not None else Reach.DIRECT if is_in_cluster() else Reach.PROXY
    return ClusterSource(api, None if all_namespaces else namespace or api.namespace, way)
