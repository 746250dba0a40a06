"""Polls all pods and gateways over HTTP in parallel: `/status`, and one scrape of `/metrics`.

A pod that doesn't answer adds a sentence to `problems`.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from stageline_api import labels, ports
from stageline_api.health import EngineStatus, StageStatus
from stageline_cli.on_call.facts.samples import Samples, parse_samples
from stageline_cli.on_call.sources.source import Endpoint, Manifest, ModelObjects

TIMEOUT_SECONDS: Final = 3.0
_MOST_AT_ONCE: Final = 16

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class PodReading:
    """One pod's response; None and empty if there was none."""

    stage: StageStatus | None = None
    engine: EngineStatus | None = None
    stage_samples: Samples = field(default_factory=Samples)
    engine_samples: Samples = field(default_factory=Samples)


@dataclass(frozen=True)
class Reading:
    """One poll of all. Pods by `<namespace>/<name>`, gateways by base URL."""

    at_seconds: float = 0.0
    """On the monotonic clock."""
    pods: Mapping[str, PodReading] = field(default_factory=dict)
    gateways: Mapping[str, Samples] = field(default_factory=dict)
    gateways_at_seconds: float = 0.0
    problems: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        samples = [*self.gateways.values(), *(one.stage_samples for one in self.pods.values())]
        return not any(one.by_name for one in (*samples, *(each.engine_samples for each in self.pods.values())))


@dataclass(frozen=True)
class _Answer:
    text: str = ""
    problem: str = ""


def pod_key(pod: Manifest) -> str:
    metadata = pod["metadata"]
    return f"{metadata.get('namespace') or 'default'}/{metadata['name']}"


def pod_endpoints(pod: Manifest) -> list[Endpoint]:
    """Endpoints of a pod's running containers: `stage`, and on stage 0 `engine`."""
    status = pod.get("status", {})
    running = {each["name"] for each in status.get("containerStatuses", []) if "running" in each.get("state", {})}
    address = status.get("podIP", "")
    if not address:
        return []
    host = f"[{address}]" if ":" in address else address
    has_engine = pod["metadata"].get("labels", {}).get(labels.STAGE) == "0"
    found = [Endpoint("stage", f"http://{host}:{ports.STAGE_HEALTH}")] if "stage" in running else []
    if has_engine and "engine" in running:
        found.append(Endpoint("engine", f"http://{host}:{ports.ENGINE_STATE}"))
    return found


def read_all(http: httpx.Client, models: Sequence[ModelObjects]) -> Reading:
    """Poll all endpoints once, for at most `TIMEOUT_SECONDS`."""
    pods = {pod_key(pod): pod_endpoints(pod) for model in models if model.is_up for pod in model.pods}
    gateways = {gateway.url for model in models if model.is_up for gateway in model.gateways}
    urls = [f"{one.url}/{page}" for found in pods.values() for one in found for page in ("status", "metrics")]
    urls += [f"{url}/metrics" for url in gateways]
    at_seconds = time.monotonic()
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        answers = dict(zip(urls, pool.map(lambda url: _get(http, url), urls), strict=True))
    problems: list[str] = []
    readings = {key: _pod_reading(key, found, answers, problems) for key, found in pods.items()}
    metrics = {url: _samples(f"gateway {url}", answers[f"{url}/metrics"], problems) for url in sorted(gateways)}
    return Reading(at_seconds, readings, metrics, at_seconds, tuple(dict.fromkeys(problems)))


def _pod_reading(
    key: str, endpoints: Sequence[Endpoint], answers: Mapping[str, _Answer], problems: list[str]
) -> PodReading:
    url_of = {one.name: one.url for one in endpoints}
    pages: dict[str, tuple[_Answer, Samples]] = {}
    for name, url in url_of.items():
        pages[name] = answers[f"{url}/status"], _samples(f"{name} of pod {key}", answers[f"{url}/metrics"], problems)
    nothing = (_Answer(), Samples())
    stage, stage_samples = pages.get("stage", nothing)
    engine, engine_samples = pages.get("engine", nothing)
    return PodReading(_parsed(StageStatus, stage), _parsed(EngineStatus, engine), stage_samples, engine_samples)


def _get(http: httpx.Client, url: str) -> _Answer:
    try:
        response = http.get(url, timeout=TIMEOUT_SECONDS)
    except httpx.HTTPError as error:
        return _Answer(problem=str(error) or type(error).__name__)
    if not response.is_success:
        return _Answer(problem=f"status {response.status_code}: {' '.join(response.text.split())[:200]}")
    return _Answer(response.text)


def _samples(who: str, answer: _Answer, problems: list[str]) -> Samples:
    if answer.problem:
        problems.append(f"{who} can't be read: {answer.problem}")
        return Samples()
    try:
        return parse_samples(answer.text)
    except ValueError as error:
        problems.append(f"{who} serves metrics that can't be read: {error}")
        return Samples()


def _parsed(kind: type[Model], answer: _Answer) -> Model | None:
    try:
        return kind.model_validate_json(answer.text)
    except ValidationError:
        return None
