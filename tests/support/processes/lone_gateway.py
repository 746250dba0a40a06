"""A gateway in a process of its own, before a scripted engine: what the system says that it costs is the gateway's."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from processes.free_ports import free_port
from processes.gateway_command import gateway_process
from processes.gateway_harness import eventually
from processes.process_costs import first_thread_seconds, most_resident_bytes
from processes.scripted_engine import ScriptedEngine


@dataclass(frozen=True)
class LoneGateway:
    """Serves at `url`."""

    pid: int
    url: str
    admin: httpx.Client
    """Of the admin port."""
    idle_bytes: int
    """The most memory that it had before anybody asked it for anything."""

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 0

    @property
    def grown_bytes(self) -> int:
        """How much more than idle it has held at most, since its start."""
        return most_resident_bytes(self.pid) - self.idle_bytes

    def bodies(self) -> dict[str, int]:
        """What it counts of bodies itself."""
        counted: dict[str, int] = self.admin.get("/status").json()["bodies"]
        return counted

    def loop_seconds(self) -> float:
        """CPU seconds that its event loop has used for what it was asked until now."""
        self.bodies()  # answered in its turn: what came before is over
        return first_thread_seconds(self.pid)


@contextmanager
def lone_gateway(
    directory: Path, engine: ScriptedEngine, *options: str, trust: ssl.SSLContext | bool = True
) -> Iterator[LoneGateway]:
    """A gateway that has found `engine`."""
    admin_port = free_port()
    with (
        gateway_process(directory, engine, "--admin-port", str(admin_port), *options, trust=trust) as (process, url),
        httpx.Client(base_url=f"http://127.0.0.1:{admin_port}", trust_env=False, timeout=60) as admin,
    ):
        eventually(lambda: admin.get("/readyz").status_code == 200, "it serves nothing")
        yield LoneGateway(process.pid, url, admin, most_resident_bytes(process.pid))
