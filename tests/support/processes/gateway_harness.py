"""A real gateway on a loopback port in a thread, and the endpoints file it reads."""

import asyncio
import gc
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from stageline_api.endpoints import Endpoints, GroupEndpoint
from stageline_gateway.app import build_app
from stageline_gateway.server.listening import bind, url_of
from stageline_gateway.server.serve import GatewayServers, Sockets
from stageline_gateway.server.tls import TlsFiles
from stageline_gateway.settings import GatewaySettings

MODEL = "tiny"
IN_FLIGHT = "stageline_gateway_requests_in_flight"
IDLE_SECONDS: Final = 600
"""How long the public port keeps a connection that nobody uses."""
LOOK_SECONDS: Final = 0.001
PATIENCE: Final[Mapping[str, Any]] = dict.fromkeys(
    ("connect_timeout_seconds", "probe_timeout_seconds", "call_timeout_seconds"), 60.0
)
"""Of waits for an engine that a test leaves as they are."""
_INCARNATIONS = count(1)


def eventually(condition: Callable[[], object], what: Callable[[], object] | str, seconds: float = 60.0) -> None:
    """Poll until `condition` holds; fail with `what` after `seconds`, which bound a hang and nothing else."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(0.01)


def group(
    url: str, index: int = 0, model: str = MODEL, ready: bool = True, message: str = "", tls_name: str = ""
) -> GroupEndpoint:
    """One entry of the endpoints file, with an incarnation of its own so that every version can be told apart."""
    return GroupEndpoint(
        model=model,
        group=index,
        incarnation=next(_INCARNATIONS),
        url=url,
        ready=ready,
        message=message,
        tls_name=tls_name,
    )


def write_endpoints(path: Path, *groups: GroupEndpoint) -> None:
    """Replace the endpoints file as its real writer does: by atomic rename."""
    temporary = path.with_suffix(".new")
    temporary.write_text(Endpoints(groups=groups).model_dump_json())
    temporary.replace(path)


@dataclass
class RunningGateway:
    """A gateway that serves at `url`."""

    url: str
    endpoints: Path
    http: httpx.Client = field(repr=False)
    admin: httpx.Client = field(repr=False)
    """Of the admin port."""
    servers: GatewayServers = field(repr=False)
    _drain: Callable[[], None] = field(repr=False)
    clock: int = field(repr=False, default=0)
    """Of the CPU time of the thread that its event loop runs in."""
    loop: asyncio.AbstractEventLoop | None = field(repr=False, default=None)

    def drain(self) -> None:
        """Have it refuse new requests, as the process does on its signal."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._drain)
        eventually(lambda: self.admin.get("/status").json()["draining"], "it did not drain")

    def loop_seconds(self) -> float:
        """CPU seconds that the event loop's thread has used: what keeps every client waiting, on any machine."""
        return time.clock_gettime(self.clock)

    @contextmanager
    def longest_turn(self) -> Iterator["LongestTurn"]:
        """Watch the event loop's turns while the context lasts. Whatever else this process does counts too."""
        assert self.loop is not None
        turn = LongestTurn(self.loop)
        self.loop.call_soon_threadsafe(turn.begin)
        try:
            yield turn
        finally:
            turn.is_over = True

    def serve(self, *groups: GroupEndpoint) -> None:
        """Write the endpoints file and wait until the gateway shows exactly these groups."""
        write_endpoints(self.endpoints, *groups)
        wanted = sorted((g.model, g.group, g.incarnation) for g in groups)
        eventually(lambda: self.shown_groups() == wanted, lambda: f"{self.shown_groups()} != {wanted}")

    def shown_groups(self) -> list[tuple[str, int, int]]:
        """What /v1/models says."""
        models = self.http.get("/v1/models").json()["data"]
        return sorted((m["id"], g["group"], g["incarnation"]) for m in models for g in m["groups"])

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """All samples on /metrics, by name and sorted labels; one without a value is none, as Prometheus has it."""
        families = text_string_to_metric_families(self.admin.get("/metrics").text)
        return {
            (sample.name, _set_labels(sample.labels)): sample.value for family in families for sample in family.samples
        }

    def sample(self, name: str, **labels: str) -> float:
        """One sample's value, 0 when it doesn't exist yet."""
        return self.samples().get((name, _set_labels(labels)), 0.0)

    def settle(self) -> None:
        """Wait until no answer is in flight. A client has its last byte before the gateway has counted its request."""
        eventually(lambda: not self._in_flight(), lambda: f"still in flight: {self._in_flight()}")

    def _in_flight(self) -> float:
        return sum(value for (name, _), value in self.samples().items() if name == IN_FLIGHT)


@dataclass
class LongestTurn:
    """CPU seconds between two looks at a loop, a millisecond apart where it has nothing else to do."""

    loop: asyncio.AbstractEventLoop
    seconds: float = 0.0
    """Of the whole process: of the loop's thread, or of another one that held the interpreter's lock meanwhile."""
    own_seconds: float = 0.0
    """Of the loop's thread."""
    is_over: bool = False
    _last: tuple[float, float] = (0.0, 0.0)

    def begin(self) -> None:
        self._last = time.process_time(), time.thread_time()
        self.loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        now = time.process_time(), time.thread_time()
        self.seconds = max(self.seconds, now[0] - self._last[0])
        self.own_seconds = max(self.own_seconds, now[1] - self._last[1])
        self._last = now
        if not self.is_over:
            self.loop.call_later(LOOK_SECONDS, self._look)


def _set_labels(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in labels.items() if value))


def _patient(settings: GatewaySettings) -> GatewaySettings:
    """The same, but a machine that stops for seconds never looks like an engine that is gone, unless a test says so."""
    unchanged = [name for name in PATIENCE if getattr(settings, name) == getattr(GatewaySettings(None), name)]
    return replace(settings, **{name: PATIENCE[name] for name in unchanged})


@contextmanager
def running_gateway(
    settings: GatewaySettings,
    tls: TlsFiles | None = None,
    trust: ssl.SSLContext | bool = True,
    connection_limit: int = 8192,
) -> Iterator[RunningGateway]:
    """Serve `settings` until the context ends; open answers are cut then. `trust` is what clients trust."""
    sockets = Sockets(bind("127.0.0.1", 0), bind("127.0.0.1", 0), tls, connection_limit)
    app = build_app(replace(_patient(settings), poll_seconds=0.02, keys_poll_seconds=0.02))
    servers = GatewayServers(app, sockets, drain_seconds=0)
    servers.public.config.timeout_keep_alive = IDLE_SECONDS
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await servers.run()

    threshold = gc.get_threshold()  # of the whole process, which a gateway thinks is its own
    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    path = settings.endpoints_path or Path("no endpoints file")
    url, admin_url = url_of(sockets.public, "https" if tls else "http"), url_of(sockets.admin)
    eventually(lambda: servers.public.started, "the gateway did not start")
    with (
        httpx.Client(base_url=url, trust_env=False, timeout=60, verify=trust) as http,
        httpx.Client(base_url=admin_url, trust_env=False, timeout=60) as admin,
    ):
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        yield RunningGateway(url, path, http, admin, servers, app.state.drain, clock, loops[0])
    servers.stop()
    thread.join(60)
    assert not thread.is_alive(), "the gateway did not stop"
    gc.set_threshold(*threshold)
