"""A real gateway on a loopback port in a thread, and the endpoints file it reads."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from stageline_api.endpoints import Endpoints, GroupEndpoint
from stageline_gateway.app import build_app
from stageline_gateway.serve import bind, url_of
from stageline_gateway.settings import GatewaySettings

MODEL = "tiny"
_INCARNATIONS = count(1)


def eventually(condition: Callable[[], object], what: Callable[[], object] | str, seconds: float = 10.0) -> None:
    """Poll until `condition` holds; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(0.01)


def group(url: str, index: int = 0, model: str = MODEL, ready: bool = True, message: str = "") -> GroupEndpoint:
    """One entry of the endpoints file, with an incarnation of its own so that every version can be told apart."""
    return GroupEndpoint(
        model=model, group=index, incarnation=next(_INCARNATIONS), url=url, ready=ready, message=message
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
        """All samples on /metrics, by name and sorted labels."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def sample(self, name: str, **labels: str) -> float:
        """One sample's value, 0 when it doesn't exist yet."""
        return self.samples().get((name, tuple(sorted(labels.items()))), 0.0)


@contextmanager
def running_gateway(settings: GatewaySettings) -> Iterator[RunningGateway]:
    """Serve `settings` until the context ends; open answers are cut then."""
    listener = bind("127.0.0.1", 0)
    app = build_app(replace(settings, poll_seconds=0.02))
    config = uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    url = url_of(listener)
    eventually(lambda: server.started, "the gateway did not start")
    with httpx.Client(base_url=url, trust_env=False, timeout=20) as http:
        yield RunningGateway(url, settings.endpoints_path, http)
    server.should_exit = True
    thread.join(15)
    assert not thread.is_alive(), "the gateway did not stop"
