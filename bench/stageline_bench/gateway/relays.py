"""The relays between clients and the synthetic engine: none, the gateway, or nginx.

The gateway and nginx have one core to themselves, and both keep their connections to the engine. nginx relays the
engine's own stream, which is less work than converting it to OpenAI's events.
"""

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stageline_api.endpoints import Endpoints, GroupEndpoint
from stageline_bench.gateway.engine_words import SERVED_NAME
from stageline_bench.gateway.processes import children, python_module, started, wait_for

RELAY_CORE: Final = 0
TOKENS_MARK: Final = {"/v1/generate": '"token_ids"', "/v1/completions": " word"}

NGINX_CONFIG: Final = """
daemon off; worker_processes 1; pid {directory}/nginx.pid; error_log stderr warn;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;
  upstream engine {{ server 127.0.0.1:{engine_port}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True)
class Relay:
    """The URL for clients, and the processes that relay."""

    name: str
    port: int
    path: str
    pids: tuple[int, ...] = field(default=())


def free_port() -> int:
    """A port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def direct(engine_port: int) -> Relay:
    """No relay: clients connect to the engine."""
    return Relay("direct", engine_port, "/v1/generate")


@contextmanager
def gateway(engine_port: int, port: int, directory: Path) -> Iterator[Relay]:
    """A gateway with one group."""
    endpoints, log = directory / "endpoints.json", directory / "gateway.log"
    url = f"http://127.0.0.1:{engine_port}"
    group = GroupEndpoint(model=SERVED_NAME, group=0, incarnation=1, url=url, ready=True)
    endpoints.write_text(Endpoints(groups=(group,)).model_dump_json())
    command = python_module("stageline_gateway", "--port", str(port), "--endpoints", str(endpoints))
    with started(command, RELAY_CORE, log) as process:
        wait_for(f"http://127.0.0.1:{port}/readyz", log)
        yield Relay("gateway", port, "/v1/completions", (process.pid,))


@contextmanager
def nginx(engine_port: int, port: int, directory: Path) -> Iterator[Relay | None]:
    """nginx with one worker; None if it is not installed."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        yield None
        return
    config, log = directory / "nginx.conf", directory / "nginx.log"
    config.write_text(NGINX_CONFIG.format(directory=directory, port=port, engine_port=engine_port))
    with started([program, "-c", str(config), "-p", str(directory)], RELAY_CORE, log) as process:
        wait_for(f"http://127.0.0.1:{port}/readyz", log)
        yield Relay("nginx", port, "/v1/generate", tuple(children(process.pid)))
