"""The soak of a pipeline: `stageline up` of a tiny model in two groups of two stages, users, and a disturber.

First all requests are asked undisturbed, which gives the answers that are due. Then come users in peace, for three
tenths of the time, then users and disturber together. Between rounds all rest, and what each process holds is read.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from chaos.soak_disturber import STEP_SECONDS, Disturber
from chaos.soak_requests import CONTEXT, MODEL, requests_of
from chaos.soak_traffic import Tally, Traffic
from chaos.soak_vitals import Vitals, vitals_of
from oracles.tiny_models import write_tiny_llama
from oracles.token_scores import ids_by_bytes
from processes.serving_command import ServingCommand, serving

GROUPS: Final = 2
PATIENCE_SECONDS: Final = 240
"""How long the gateway holds and resumes requests: a group's restart may take a minute where all else runs besides."""
READY_SECONDS: Final = 240.0
PEACEFUL_SHARE: Final = 0.3
MOST_ROUND_SECONDS: Final = 300.0
PROGRESS_SECONDS: Final = 30.0
SETTLED_LOOKS: Final = 6
SETTLE_SECONDS: Final = 30.0
_MANIFEST: Final = """
apiVersion: stageline.dev/v1alpha1
kind: PipelineModel
metadata: {{name: {name}}}
spec:
  model: {{source: "file://{model}"}}
  engine: {{dtype: float32, maxModelLen: {context}, maxNumSeqs: 8}}
  parallelism: {{pipeline: 2}}
  replicas: {groups}
  restart: {{maxRestarts: 1000, windowSeconds: 5, backoffSeconds: 1}}
  timeouts: {{resumeWindowSeconds: {patience}, stepSeconds: {step}}}
"""


@dataclass(slots=True)
class PipelineSoak:
    """What came of it so far. `rests` are what all processes held at each rest, in order."""

    seed: int
    minutes: float
    began: float = field(default_factory=time.monotonic)
    tally: Tally = field(default_factory=Tally)
    disturber: Disturber | None = None
    rests: list[list[Vitals]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Of the soak itself, beside those of the tally and the disturber."""
    is_over: bool = False


Say = Callable[[str], None]


@contextmanager
def serving_soaked(directory: Path) -> Iterator[tuple[ServingCommand, Path]]:
    """`stageline up` of the tiny model, and the model's directory."""
    model = write_tiny_llama(directory / "model", num_layers=4, context_length=CONTEXT)
    file = directory / "tiny.yaml"
    words = {"name": MODEL, "model": model, "context": CONTEXT, "groups": GROUPS}
    file.write_text(_MANIFEST.format(**words, patience=PATIENCE_SECONDS, step=STEP_SECONDS), encoding="utf-8")
    with serving(file, directory, directory / "cache") as served:
        yield served, model


async def soak(
    served: ServingCommand, model: Path, state: PipelineSoak, say: Say, clients: int, requests_of_each: int
) -> None:
    """Fill `state`; it holds what there is also when this is cancelled."""
    rng = random.Random(state.seed)
    disturber = state.disturber = Disturber(served, random.Random(rng.random()), say)
    requests = requests_of(random.Random(rng.random()), requests_of_each)
    traffic = Traffic(served.url, requests, ids_by_bytes(model), disturber.was_away, state.tally)
    await all_ready(served)
    say(f"both groups are ready; {len(requests)} requests are asked undisturbed")
    if wrong := await traffic.ask_undisturbed(clients):
        state.failures += wrong
        return
    await rest(served, state, say)
    peace, storm = state.minutes * 60 * PEACEFUL_SHARE, state.minutes * 60 * (1 - PEACEFUL_SHARE)
    await _with_progress("in peace", traffic.ask_for(peace, clients, rng), state, say)
    await rest(served, state, say)
    for seconds in rounds(storm):
        both = _both(traffic.ask_for(seconds, clients, rng), disturber.disturb_for(seconds))
        await _with_progress("disturbed", both, state, say)
        await all_ready(served)
        await rest(served, state, say)
    state.is_over = True


def rounds(seconds: float) -> list[float]:
    """Rounds of equal length, none longer than `MOST_ROUND_SECONDS`, two at least."""
    count = max(2, -int(-seconds // MOST_ROUND_SECONDS))
    return [seconds / count] * count


async def _both(*running: Coroutine[Any, Any, None]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for each in running:
            tasks.create_task(each)


async def _with_progress(what: str, running: Coroutine[Any, Any, None], state: PipelineSoak, say: Say) -> None:
    async def tell() -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            say(progress_line(what, state))

    telling = asyncio.create_task(tell())
    try:
        await running
    finally:
        telling.cancel()


def progress_line(what: str, state: PipelineSoak) -> str:
    """Where the soak is."""
    tally, disturber = state.tally, state.disturber
    blows = len(disturber.blows) if disturber else 0
    failures = len(tally.failures) + len(state.failures) + (len(disturber.failures) if disturber else 0)
    return f"{what}: {tally.answered.total()} answers, {tally.resumes} resumes, {blows} blows, {failures} failures"


async def all_ready(served: ServingCommand) -> None:
    """Until the gateway sends requests to every group; raises AssertionError when that takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    async with httpx.AsyncClient(base_url=served.url, timeout=5.0, trust_env=False) as client:
        while (ready := await _ready_groups(client)) < GROUPS:
            assert served.process.poll() is None, f"up ended with {served.process.returncode}"
            assert time.monotonic() < deadline, f"{ready} of {GROUPS} groups are ready after {READY_SECONDS:g} s"
            await asyncio.sleep(0.1)


async def _ready_groups(client: httpx.AsyncClient) -> int:
    try:
        listed = (await client.get("/v1/models")).json()["data"]
        return sum(group["ready"] for model in listed for group in model["groups"])
    except (httpx.HTTPError, ValueError, KeyError):
        return 0


async def rest(served: ServingCommand, state: PipelineSoak, say: Say) -> None:
    """Read what every process holds, once their descriptors have stopped to change."""
    deadline, same = time.monotonic() + SETTLE_SECONDS, 0
    vitals = vitals_of(served.process.pid)
    while same < SETTLED_LOOKS and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        later = vitals_of(served.process.pid)
        same = same + 1 if [(one.pid, one.files) for one in later] == [(one.pid, one.files) for one in vitals] else 0
        vitals = later
    state.rests.append(vitals)
    say(progress_line("at rest", state))
