"""Polls stages and engines over HTTP: their `/status`, and the stages' state clocks from `/metrics`.

A pod that does not answer is omitted: probes decide whether it is alive.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from stageline_api import labels, ports
from stageline_api.health import EngineStatus, StageStatus

_TIMEOUT_SECONDS: Final = 2.0

Status = TypeVar("Status", StageStatus, EngineStatus)


class ClockSeconds(NamedTuple):
    """Seconds of one or more stages' state clocks. `dummy` is part of `busy`."""

    busy: float = 0.0
    dummy: float = 0.0
    wait: float = 0.0
    idle: float = 0.0

    def since(self, earlier: "ClockSeconds") -> "ClockSeconds":
        return ClockSeconds(*(now - then for now, then in zip(self, earlier, strict=True)))

    @property
    def bubble(self) -> float | None:
        """(wait + dummy) / (busy + wait); None if the stages were idle throughout."""
        engaged = self.busy + self.wait
        return (self.wait + self.dummy) / engaged if engaged > 0 else None


@dataclass(frozen=True)
class Readings:
    """One poll of all pods. Stages by pod name; `clock` is the sum over stages, `generated_tokens` over engines."""

    stages: Mapping[str, StageStatus] = field(default_factory=dict)
    engines: Mapping[str, EngineStatus] = field(default_factory=dict)
    clock: ClockSeconds = field(default_factory=ClockSeconds)
    at_seconds: float = 0.0

    @property
    def generated_tokens(self) -> int:
        return sum(engine.generation_tokens_total for engine in self.engines.values())


@dataclass(frozen=True)
class Rates:
    tokens_per_second: float
    bubble: float | None


def rates_between(earlier: Readings, later: Readings) -> Rates | None:
    """Rates over an interval; None if the set of stages or engines changed, because their counters restarted."""
    seconds = later.at_seconds - earlier.at_seconds
    if seconds <= 0 or earlier.stages.keys() != later.stages.keys() or earlier.engines.keys() != later.engines.keys():
        return None
    tokens = later.generated_tokens - earlier.generated_tokens
    spent = later.clock.since(earlier.clock)
    return Rates(tokens / seconds, spent.bubble)


async def poll(pods: Sequence[Mapping[str, Any]]) -> Readings:
    """Poll every pod with an address, all at once."""
    # trust_env: the user's proxy must not see loopback requests; verify: there is no TLS here, and loading roots is
    # slow.
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=_TIMEOUT_SECONDS) as client:
        answers = await asyncio.gather(*(_ask_pod(client, pod) for pod in pods))
    stages = {name: stage for name, stage, _, _ in answers if stage is not None}
    engines = {name: engine for name, _, engine, _ in answers if engine is not None}
    # Field by field; the leading zeros are the sum without pods.
    clocks = (clock for _, _, _, clock in answers)
    total = ClockSeconds(*map(sum, zip(ClockSeconds(), *clocks, strict=True)))
    return Readings(stages, engines, total, asyncio.get_running_loop().time())


async def _ask_pod(
    client: httpx.AsyncClient, pod: Mapping[str, Any]
) -> tuple[str, StageStatus | None, EngineStatus | None, ClockSeconds]:
    name, address = pod["metadata"]["name"], pod["status"].get("podIP", "")
    has_engine = pod["metadata"]["labels"].get(labels.STAGE) == "0"
    stage_text, metrics_text, engine_text = await asyncio.gather(
        _get(client, f"http://{address}:{ports.STAGE_HEALTH}/status"),
        _get(client, f"http://{address}:{ports.STAGE_HEALTH}/metrics"),
        _get(client, f"http://{address}:{ports.ENGINE_STATE}/status") if has_engine else _nothing(),
    )
    return name, _parsed(StageStatus, stage_text), _parsed(EngineStatus, engine_text), clock_seconds(metrics_text)


async def _nothing() -> str:
    return ""


async def _get(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = await client.get(url)
    except httpx.HTTPError:
        return ""
    return response.text if response.is_success else ""


def _parsed(kind: type[Status], text: str) -> Status | None:
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        return None


def clock_seconds(exposition: str) -> ClockSeconds:
    busy = dummy = wait = idle = 0.0
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            match sample.name:
                case "stageline_stage_busy_seconds_total":
                    busy += sample.value
                    dummy += sample.value if sample.labels.get("kind") == "dummy" else 0.0
                case "stageline_stage_wait_seconds_total":
                    wait += sample.value
                case "stageline_stage_idle_seconds_total":
                    idle += sample.value
    return ClockSeconds(busy, dummy, wait, idle)
