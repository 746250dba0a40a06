"""`stageline gateway`: the container's entry point, also started by `stageline up`.

What serves is imported only when the command runs, so that `stageline --help` stays quick.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from stageline_api import env, ports
from stageline_api.engine_access import read_keys
from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_api.telemetry.logs import FORMATS, LEVELS, LogSettings, configure_logging
from stageline_gateway.origins import check_listed_origin
from stageline_kubernetes.places import own_namespace, read_namespaces

_Command = TypeVar("_Command", bound=Callable[..., None])


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


def _count(name: str, default: int, text: str) -> Callable[[_Command], _Command]:
    return _option(name, click.IntRange(1), default, text, in_env=True)


def _port(name: str, default: int | None, text: str) -> Callable[[_Command], _Command]:
    return _option(name, click.IntRange(0, 65535), default, text)


def _path(name: str, text: str, may_be_directory: bool = False) -> Callable[[_Command], _Command]:
    return _option(name, click.Path(dir_okay=may_be_directory, path_type=Path), None, text)


def _read_namespaces(_: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return read_namespaces(given)
    except ValueError as error:
        raise click.BadParameter(str(error), param=option) from None


def _read_origins(_: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    try:
        for origin in given:
            check_listed_origin(origin)
    except ValueError as error:
        raise click.BadParameter(str(error), param=option) from None
    return given


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
    help="Namespace to serve, with --kubernetes. Default: the gateway's own.",
)
@click.option(
    "--allowed-host",
    multiple=True,
    envvar="STAGELINE_GATEWAY_ALLOWED_HOST",
    show_envvar=True,
    help="Allowed Host header, besides IP addresses and localhost. Default: any; none if --host is loopback and "
    "there are no keys.",
)
@_option(
    "admin-host",
    click.STRING,
    "127.0.0.1",
    "Address of the admin port (metrics, state), which is unauthenticated.",
    True,
)
@_port("admin-port", None, "Admin port. Default: the one after --port, or a free one.")
@_path("keys", "API keys: a file, or a directory of files as a Secret is mounted; re-read when changed.", True)
@_count("queue-limit", 1024, "Maximum requests of one model without a first token; each choice of `n` counts.")
@_count("open-limit", 4096, "Maximum open requests; each choice of `n` counts.")
@_count("body-room-bytes", 128 * 1024 * 1024, "Maximum bytes of the bodies of all open requests.")
@_count("connection-limit", 8192, "Maximum client connections.")
@_path("tls-certificate", "PEM certificate (chain) to serve HTTPS with; re-read when changed.")
@_path("tls-key", "Its PEM key.")
@_path("engine-authority", "PEM certificate authorities of engines with TLS; re-read when changed.")
@_seconds(
    "withdraw-seconds", 0.0, "Seconds for which requests are accepted after SIGTERM, while /accepting returns 503."
)
@_seconds("drain-seconds", 30.0, "Seconds that open answers have after that.")
@_seconds("idle-timeout-seconds", 120.0, "Maximum silence of an engine before the first token.", 0.01)
@_seconds("stall-timeout-seconds", 30.0, "Maximum silence of an engine between two tokens of an answer.", 0.01)
@_seconds("send-timeout-seconds", 60.0, "Seconds that a client may stop reading before its connection is closed.", 0.01)
@_seconds("keep-alive-seconds", 15.0, "Silence of a stream after which a comment or a `ping` is sent.", 0.01)
@_seconds("hold-seconds", 30.0, "Seconds that a new request waits for a ready group.")
@_seconds("start-hold-seconds", 600.0, "Seconds that it waits for the first group of a model scaled to zero.")
@_seconds("resume-window-seconds", None, "Overrides `timeouts.resumeWindowSeconds` of every model.")
@_seconds(
    "drain-patience-seconds", 10.0, "Seconds that an answer stays on a draining group if another could continue it."
)
@_seconds("probe-seconds", 2.0, "Probe period: each engine is probed twice in this time.", 0.1)
@click.option(
    "--otlp-endpoint",
    default=None,
    help="OpenTelemetry collector, as http://host:4318; needs stageline[tracing].",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    callback=_read_origins,
    metavar="ORIGIN",
    envvar="STAGELINE_GATEWAY_CORS_ORIGIN",
    show_envvar=True,
    help="Allowed CORS origin, as https://chat.example.org; * is any. Default: none.",
)
@click.option(
    "--strict-fields",
    is_flag=True,
    envvar="STAGELINE_GATEWAY_STRICT_FIELDS",
    show_envvar=True,
    help="Refuse known fields that have no effect instead of naming them in a header.",
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
    from stageline_gateway.app import build_app
    from stageline_gateway.server.listening import bind, bind_near, url_of
    from stageline_gateway.server.serve import ShutdownTimes, Sockets, serve
    from stageline_gateway.server.tls import TlsFiles
    from stageline_gateway.settings import GatewaySettings

    configure_logging("gateway", LogSettings(log_format, log_level), hides_values=True)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if access_log else logging.WARNING)
    if (tls_certificate is None) != (tls_key is None):
        raise click.UsageError("--tls-certificate and --tls-key go together.")
    settings = GatewaySettings(
        endpoints_path=endpoints,
        namespaces=(served := _served_namespaces(endpoints, kubernetes, namespaces)),
        own_namespace=own_namespace() or "",
        engine_keys=_engine_keys(served),
        keys_path=keys,
        hosts=_hosts(allowed_host, host, keys),
        probe_interval_seconds=probe_seconds / 2,
        probe_timeout_seconds=probe_seconds / 2,
        **manners,
    )
    if endpoints is None:
        from stageline_gateway.groups import discovery_kubernetes

        discovery_kubernetes.check_login()
    app = build_app(settings)
    public = bind(host, port)
    beside = (public.getsockname()[1] + 1) % 65536
    admin = bind_near(admin_host, beside) if admin_port is None else bind(admin_host, admin_port)
    tls = None if tls_certificate is None or tls_key is None else TlsFiles(tls_certificate, tls_key)
    logging.getLogger(__name__).info(
        "gateway listening on %s admin on %s endpoints=%s",
        url_of(public, "https" if tls else "http"), url_of(admin), endpoints or f"namespaces {','.join(served)}",
    )  # fmt: skip
    times = ShutdownTimes(withdraw_seconds, drain_seconds)
    serve(app, Sockets(public, admin, tls, connection_limit), times, access_log)


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
