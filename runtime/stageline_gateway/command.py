"""`stageline gateway`: the container's entry point, also started by `stageline up`.

What serves is imported only when the command runs, so that `stageline --help` stays quick.
"""

import logging
from pathlib import Path

import click

from stageline_api import ports


def _configure_logging(access_log: bool) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for noisy in ("httpx", "httpcore", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if access_log else logging.WARNING)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=ports.GATEWAY,
    show_default=True,
    help="Port to listen on; 0 picks a free one and logs it.",
)
@click.option(
    "--endpoints",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="File that lists the groups to serve; re-read whenever it is replaced.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="How long open answers may take to finish after SIGTERM.",
)
@click.option(
    "--idle-timeout-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Longest silence of an engine before its request counts as failed.",
)
@click.option("--access-log", is_flag=True, help="Log one line per request.")
def gateway(
    host: str, port: int, endpoints: Path, drain_seconds: float, idle_timeout_seconds: float, access_log: bool
) -> None:
    """Serve OpenAI's API in front of the groups that an endpoints file lists."""
    from stageline_gateway.app import build_app
    from stageline_gateway.serve import bind, serve, url_of
    from stageline_gateway.settings import GatewaySettings

    _configure_logging(access_log)
    listener = bind(host, port)
    settings = GatewaySettings(endpoints_path=endpoints, idle_timeout_seconds=idle_timeout_seconds)
    logging.getLogger(__name__).info("gateway listening on %s endpoints=%s", url_of(listener), endpoints)
    serve(build_app(settings), listener, drain_seconds, access_log)
