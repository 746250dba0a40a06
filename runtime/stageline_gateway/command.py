"""`stageline gateway`: the container's entry point, also started by `stageline up`.

What serves is imported only when the command runs, so that `stageline --help` stays quick.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from stageline_api import env, ports
from stageline_api.engine_access import read_keys
from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_api.telemetry.logs import FORMATS, LEVELS, LogSettings, configure_logging
from stageline_kubernetes.places import own_namespace, read_namespaces

_Command = TypeVar("_Command", bound=Callable[..., None])
MOST_WORKERS: Final = 64


def _option(name: str, kind: Any, default: object, text: str, in_env: bool = False) -> Callable[[_Command], _Command]:
    """An option; with `in_env` the environment may set it too: `STAGELINE_GATEWAY_` and its name.

    Never a port: Kubernetes sets STAGELINE_GATEWAY_PORT to something else where a Service is called stageline-gateway.
    """
    return click.option(
        f"--{name}",
        type=kind,
        default=default,
        show_default=default is not None,
        show_envvar=in_env,
        envvar=f"STAGELINE_GATEWAY_{name.replace('-', '_').upper()}" if in_env else None,
        help=text,
    )


def _seconds(name: str, default: float | None, text: str, least: float = 0.0) -> Callable[[_Command], _Command]:
    return _option(name, click.FloatRange(min=least), default, text, in_env=True)


def _count(name: str, default: int, text: str, most: int | None = None) -> Callable[[_Command], _Command]:
    return _option(name, click.IntRange(1, most), default, text, in_env=True)


def _port(name: str, default: int | None, text: str) -> Callable[[_Command], _Command]:
    return _option(name, click.IntRange(0, 65535), default, text)


def _path(name: str, text: str, may_be_directory: bool = False) -> Callable[[_Command], _Command]:
    return _option(name, click.Path(dir_okay=may_be_directory, path_type=Path), None, text)


def _read_namespaces(_: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return read_namespaces(given)
    except ValueError as error:
        raise click.BadParameter(str(error), param=option) from None


@click.command()
@_option("host", click.STRING, "127.0.0.1", "Address to listen on.")
@_port("port", ports.GATEWAY, "Port to listen on; 0 picks a free one and logs it.")
@_path("endpoints", "File that lists the groups to serve; re-read whenever it is replaced.")
@click.option(
    "--kubernetes", is_flag=True, help="Serve the PipelineModels of a cluster's namespaces instead of a file."
)
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    callback=_read_namespaces,
    metavar="NAME[,NAME…]",
    envvar=env.GATEWAY_NAMESPACES,
    show_envvar=True,
    help="A namespace, with --kubernetes; may be repeated. Default: that of the gateway's own pod.",
)
@click.option(
    "--allowed-host",
    multiple=True,
    envvar="STAGELINE_GATEWAY_ALLOWED_HOST",
    show_envvar=True,
    help="A name that requests may give as their Host, besides addresses and localhost; may be repeated. Default: any "
    "name, but none where --host is this machine's own and there are no keys.",
)
@_option(
    "admin-host", click.STRING, "127.0.0.1", "Address of the admin port (metrics, state, drain); it asks no key.", True
)
@_port("admin-port", None, "The admin port; without it the one after --port, or a free one if that is taken.")
@_count(
    "workers",
    1,
    "Processes that serve on the port together, each on up to a core; limits hold for all of them.",
    MOST_WORKERS,
)
@_path("keys", "API keys: a file, or a directory of files as a Secret is mounted; re-read when changed.", True)
@_count("queue-limit", 1024, "Requests of one model that may wait for their first token; each choice of `n` counts.")
@_count("open-limit", 4096, "Requests that may be open at once; each choice of `n` counts.")
@_count("body-room-bytes", 128 * 1024 * 1024, "Bytes that the bodies of all open requests may hold together.")
@_count("connection-limit", 8192, "Clients' connections that may be open at once.")
@_path("tls-certificate", "PEM certificate (chain) to serve HTTPS with; re-read when changed.")
@_path("tls-key", "Its PEM key.")
@_path("engine-authority", "PEM certificates of who signs those of engines that talk by TLS; re-read when changed.")
@_seconds("withdraw-seconds", 0.0, "How long requests are still taken after SIGTERM, while /accepting says no already.")
@_seconds("drain-seconds", 30.0, "How long open answers may take to finish then.")
@_seconds("idle-timeout-seconds", 120.0, "Longest silence of an engine before a request's first token.", 0.01)
@_seconds("stall-timeout-seconds", 30.0, "Longest silence of an engine between two tokens of one answer.", 0.01)
@_seconds("send-timeout-seconds", 60.0, "How long a client may stop reading before its answer is given up.", 0.01)
@_seconds("hold-seconds", 30.0, "How long a new request waits while no group of its model is ready.")
@_seconds("start-hold-seconds", 600.0, "How long it waits for the first group of a model that was scaled to zero.")
@_seconds("resume-window-seconds", None, "Sets `timeouts.resumeWindowSeconds` of every model aside, if given.")
@_seconds("drain-patience-seconds", 10.0, "How long an answer stays on a group that drains if another could take it.")
@_seconds("probe-seconds", 2.0, "Longest use of an engine that is gone: each is asked twice in this time.", 0.1)
@click.option(
    "--otlp-endpoint",
    default=None,
    help="OpenTelemetry collector to send spans of requests to, as http://host:4318; needs stageline[tracing].",
)
@click.option(
    "--strict-fields",
    is_flag=True,
    envvar="STAGELINE_GATEWAY_STRICT_FIELDS",
    show_envvar=True,
    help="Refuse fields of OpenAI's and vLLM's that change nothing here; else a header of the answer names them.",
)
@click.option("--access-log", is_flag=True, help="Log one line per request.")
@click.option("--log-format", type=click.Choice(FORMATS), default="auto", show_default=True, envvar=env.LOG_FORMAT,
              show_envvar=True, help="auto: text on a terminal, JSON elsewhere.")  # fmt: skip
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, envvar=env.LOG_LEVEL,
              show_envvar=True, help="SIGUSR1 makes it debug in a running gateway, SIGUSR2 sets it back.")  # fmt: skip
def gateway(
    host: str,
    port: int,
    endpoints: Path | None,
    kubernetes: bool,
    namespaces: tuple[str, ...],
    allowed_host: tuple[str, ...],
    admin_host: str,
    admin_port: int | None,
    workers: int,
    keys: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    connection_limit: int,
    withdraw_seconds: float,
    drain_seconds: float,
    probe_seconds: float,
    access_log: bool,
    log_format: str,
    log_level: str,
    **manners: Any,
) -> None:
    """Serve OpenAI's API in front of the groups that an endpoints file lists, or that run in a cluster's namespaces."""
    from stageline_gateway.server.listening import bind, bind_near, url_of
    from stageline_gateway.serving import Serving, serve_alone, serve_by_workers
    from stageline_gateway.settings import GatewaySettings

    def configure_log() -> None:
        configure_logging("gateway", LogSettings(log_format, log_level), hides_values=True)
        logging.getLogger("uvicorn.access").setLevel(logging.INFO if access_log else logging.WARNING)

    configure_log()
    if (tls_certificate is None) != (tls_key is None):
        raise click.UsageError("--tls-certificate and --tls-key go together.")
    settings = GatewaySettings(
        endpoints_path=endpoints,
        namespaces=(served := _served_namespaces(endpoints, kubernetes, namespaces)),
        own_namespace=own_namespace() or "",
        engine_keys=_engine_keys(served),
        keys_path=keys,
        hosts=_hosts(allowed_host, host, keys),
        workers_each_core=workers_each_core(workers),
        probe_interval_seconds=probe_seconds / 2,
        probe_timeout_seconds=probe_seconds / 2,
        **manners,
    )
    files = None if tls_certificate is None or tls_key is None else (tls_certificate, tls_key)

    def listen() -> tuple[socket.socket, socket.socket]:
        public = bind(host, port)
        beside = (public.getsockname()[1] + 1) % 65536
        return public, bind_near(admin_host, beside) if admin_port is None else bind(admin_host, admin_port)

    def say_where(public: socket.socket, admin: socket.socket) -> None:
        logging.getLogger(__name__).info(
            "gateway listening on %s admin on %s endpoints=%s",
            url_of(public, "https" if files else "http"), url_of(admin), endpoints or f"namespaces {','.join(served)}",
        )  # fmt: skip

    serving = Serving(settings, files, connection_limit, withdraw_seconds, drain_seconds, access_log)
    if workers == 1:
        serve_alone(serving, listen, say_where)
    else:
        sys.exit(serve_by_workers(workers, serving, listen, say_where, configure_log))


def workers_each_core(workers: int) -> float:
    """How many of so many take turns on a core of those that this process may run on."""
    return max(1.0, workers / len(os.sched_getaffinity(0)))


def _hosts(allowed: tuple[str, ...], host: str, keys: Path | None) -> frozenset[str] | None:
    """What may be asked for. Without keys a gateway on this machine's own address is for this machine's people alone.

    Other addresses have names that only their networks know.
    """
    if allowed:
        return frozenset(name.lower() for name in allowed)
    is_own = host in ("localhost", "::1") or host.startswith("127.")
    return frozenset() if keys is None and is_own else None


def _engine_keys(namespaces: tuple[str, ...]) -> str:
    text = os.environ.get(env.ENGINE_KEYS, "")
    if text and len(namespaces) > 1:
        rule = f"of several namespaces ({', '.join(namespaces)}) each has a key of its own, in its Secret"
        raise UserError(f"{env.ENGINE_KEYS}: leave it out: {rule}", USAGE_EXIT_CODE)
    try:
        read_keys(text)
    except ValueError as error:
        raise UserError(f"{env.ENGINE_KEYS}: {error}", USAGE_EXIT_CODE) from None
    return text


def _served_namespaces(endpoints: Path | None, kubernetes: bool, namespaces: tuple[str, ...]) -> tuple[str, ...]:
    """Whose PipelineModels are served; raises UserError when that isn't clear."""
    if kubernetes == (endpoints is not None) or (namespaces and not kubernetes):
        message = "Give either --endpoints FILE or --kubernetes, and --namespace only with the latter."
        raise UserError(message, USAGE_EXIT_CODE)
    if not kubernetes:
        return ()
    return namespaces or (own_namespace() or "default",)
