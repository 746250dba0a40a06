"""`stageline operator`: the container's entry point, which also runs outside a cluster.

It imports kopf and the client only when the command runs, so that `stageline --help` stays fast.
"""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from stageline_api import env, ports
from stageline_api.telemetry.logs import FORMATS, LEVELS, LogSettings, configure_logging
from stageline_kubernetes.places import NAMESPACE, read_namespaces
from stageline_operator.controller.settings import LeaseName, OperatorSettings
from stageline_operator.planner.types import ANY_PROMETHEUS

_URL = re.compile(r"https?://[^\s/]+(/\S*)?")
_TRACING_NAME = re.compile(r"OTEL_[A-Z0-9_]+")
_ANYTHING = re.compile(r".*", re.DOTALL)
_PEER_FIELDS = frozenset({"podSelector", "namespaceSelector", "ipBlock"})


def _namespaces(_: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return read_namespaces(given)
    except ValueError as error:
        raise click.BadParameter(str(error), param=option) from None


def _pairs(name: re.Pattern[str], value: re.Pattern[str], form: str) -> Callable[..., dict[str, str]]:
    """A callback that parses the `name=value` pairs of a repeated option."""

    def parse(_: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
        found: dict[str, str] = {}
        for text in given:
            key, equals, content = text.partition("=")
            if not equals or not name.fullmatch(key) or not value.fullmatch(content):
                raise click.BadParameter(f'"{text}" is not {form}', param=option)
            found[key] = content
        return found

    return parse


def _peers(_: click.Context, option: click.Parameter, given: str | None) -> tuple[Mapping[str, Any], ...]:
    if given is None:
        return ANY_PROMETHEUS
    try:
        found = json.loads(given)
    except ValueError as error:
        raise click.BadParameter(f"it can't be read as JSON: {error}", param=option) from None
    if not isinstance(found, list):
        raise click.BadParameter(f"it must be a list of NetworkPolicy peers, not {given[:80]}", param=option)
    for peer in found:
        if not isinstance(peer, dict) or not peer or not peer.keys() <= _PEER_FIELDS:
            message = f"{json.dumps(peer)[:80]} is no NetworkPolicy peer ({', '.join(sorted(_PEER_FIELDS))})"
            raise click.BadParameter(message, param=option)
    return tuple(found)


@click.command()
@click.option("--namespace", "namespaces", multiple=True, callback=_namespaces, metavar="NAME[,NAME…]",
              envvar="STAGELINE_NAMESPACES", help="Namespace to serve; may be repeated. Default: all.")  # fmt: skip
@click.option("--kubeconfig", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Default: $KUBECONFIG, then the pod's service account, then ~/.kube/config.")  # fmt: skip
@click.option("--context", help="Context of the kubeconfig. Default: its current one.")
@click.option("--image", required=True, envvar="STAGELINE_IMAGE",
              help="Default image of stage pods.")  # fmt: skip
@click.option("--leader-elect/--no-leader-elect", default=True, show_default=True,
              help="Act only while holding a Lease, so that several replicas may run.")  # fmt: skip
@click.option("--lease-namespace", envvar="POD_NAMESPACE", help="Default: the pod's own namespace, else default.")
@click.option("--lease-name", default="stageline-operator", show_default=True, help="Name of the Lease.")
@click.option("--metrics-host", default="0.0.0.0", show_default=True, help="Address of /metrics, /healthz, /readyz.")
@click.option(
    "--metrics-from",
    callback=_peers,
    metavar="JSON",
    help="NetworkPolicy peers that may scrape stages and engines. "
    "Default: pods labelled app.kubernetes.io/name=prometheus in any namespace.",
)
@click.option(
    "--gateway-url",
    "gateway_urls",
    multiple=True,
    callback=_pairs(NAMESPACE, _URL, "NAMESPACE=URL, as in models=http://gateway:8080/v1"),
    metavar="NAMESPACE=URL",
    help="Base URL at which a gateway serves the models of a namespace, for their status.url. May be repeated.",
)
@click.option(
    "--tracing-env",
    callback=_pairs(_TRACING_NAME, _ANYTHING, "OTEL_NAME=VALUE"),
    multiple=True,
    metavar="OTEL_NAME=VALUE",
    help="OpenTelemetry variable of engines, such as OTEL_EXPORTER_OTLP_ENDPOINT.",
)
@click.option("--gpu-runtime-class", default="", metavar="NAME",
              help="Default runtime class of stage pods that use GPUs.")  # fmt: skip
@click.option("--vllm-image", default="", metavar="IMAGE",
              help="Default image of stages with `engine.name: vllm`. "
                   "Default: --image, which must then hold vLLM.")  # fmt: skip
@click.option("--vllm-files-image", default="", metavar="IMAGE",
              help="Image of the init container that adds Stageline to it. Default: --image.")  # fmt: skip
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=ports.OPERATOR_METRICS, show_default=True,
              help="Their port; 0 picks a free one and logs it.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1, 64), default=8, show_default=True,
              help="PipelineModels reconciled at the same time.")  # fmt: skip
@click.option("--relist-seconds", type=click.FloatRange(min=5), default=300.0, show_default=True,
              help="Seconds between full lists of everything watched.")  # fmt: skip
@click.option("--log-format", type=click.Choice(FORMATS), default="auto", show_default=True, envvar=env.LOG_FORMAT,
              show_envvar=True, help="auto: text on a terminal, JSON elsewhere.")  # fmt: skip
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, envvar=env.LOG_LEVEL,
              show_envvar=True, help="SIGUSR1 makes it debug in a running operator, SIGUSR2 sets it back.")  # fmt: skip
def operator(
    namespaces: tuple[str, ...],
    kubeconfig: Path | None,
    context: str | None,
    image: str,
    leader_elect: bool,
    lease_namespace: str | None,
    lease_name: str,
    metrics_host: str,
    metrics_port: int,
    metrics_from: tuple[Mapping[str, Any], ...],
    gateway_urls: dict[str, str],
    tracing_env: dict[str, str],
    gpu_runtime_class: str,
    vllm_image: str,
    vllm_files_image: str,
    workers: int,
    relist_seconds: float,
    log_format: str,
    log_level: str,
) -> None:
    """Reconcile the PipelineModels of a cluster until it is stopped.

    Exits with status 0 on SIGTERM and Ctrl-C, after running passes have finished and the lease is released.
    """
    from stageline_kubernetes.places import own_namespace

    configure_logging("operator", LogSettings(log_format, log_level))
    # It warns at each start that it does not handle signals, which is intended; `_run_kopf` logs its end.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.CRITICAL)
    lease = LeaseName(lease_namespace or own_namespace() or "default", lease_name) if leader_elect else None
    settings = OperatorSettings(
        default_image=image,
        identity=f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}",
        metrics_from=metrics_from,
        own_namespace=own_namespace(),
        gateway_urls=gateway_urls,
        tracing_env=tracing_env,
        gpu_runtime_class=gpu_runtime_class,
        vllm_image=vllm_image,
        vllm_files_image=vllm_files_image,
        namespaces=namespaces,
        kubeconfig=kubeconfig,
        context=context,
        lease=lease,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        workers=workers,
        relist_seconds=relist_seconds,
    )
    asyncio.run(_serve(settings))


async def _serve(settings: OperatorSettings) -> None:
    from stageline_kubernetes.login import load_configuration
    from stageline_operator.controller.process import OperatorProcess

    configuration = await load_configuration(settings.kubeconfig, settings.context)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await OperatorProcess(settings, configuration).run(stop)
