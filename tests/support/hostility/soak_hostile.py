"""The soak's hostile part: a thousand bodies made to hold others up, and a clock on every other client's tokens.

One body is sent at a time, so whoever's tokens pause meanwhile paused for it, or for the machine. A body that held
somebody up is sent twice again: what held up in two of three is a failure, the rest is the machine's and is counted.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from chaos.groups import serving_tiny
from chaos.soak_vitals import MEBIBYTE, vitals_of
from hostility.bystanders import Bystander, bystanders
from hostility.hostile_requests import HostileRequest, hostile_requests
from processes.serving_command import ServingCommand

LONGEST_GAP_SECONDS: Final = 0.25
ANSWER_SECONDS: Final = 120.0
AFTERWARDS_SECONDS: Final = 0.1
"""What a request leaves to do, such as a schema that is compiled for it, may come after its answer."""
MOST_BYTES: Final = 1024 * MEBIBYTE
"""Of one process' memory: what the chart allows a gateway."""
CONTEXT: Final = 4_096
PROGRESS: Final = 100


@dataclass(slots=True)
class HostileSoak:
    """What came of it so far."""

    seed: int
    count: int
    answered: Counter[str] = field(default_factory=Counter)
    """By status."""
    gaps: dict[str, float] = field(default_factory=dict)
    """The largest of each kind, in seconds."""
    held_up_once: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


@contextmanager
def serving_hostile(directory: Path) -> Iterator[ServingCommand]:
    """One group with room for many and a long context."""
    with serving_tiny(directory, replicas=1, engine=", maxNumSeqs: 32", context_length=CONTEXT) as groups:
        yield groups.served


def soak_hostile(url: str, state: HostileSoak, say: Callable[[str], None], is_well: Callable[[], str]) -> None:
    """Fill `state`. `is_well` says what is wrong with whoever serves, or nothing."""
    with (
        bystanders(url, state.failures) as watching,
        httpx.Client(base_url=url, timeout=ANSWER_SECONDS, trust_env=False) as http,
    ):
        for number, request in enumerate(hostile_requests(random.Random(state.seed), state.count), 1):
            judge(http, request, watching, state)
            if wrong := is_well():
                state.failures.append(f"after {request.kind}: {wrong}")
                return
            if number % PROGRESS == 0:
                say(f"hostile: {number} of {state.count} bodies, {len(state.failures)} failures")


def judge(http: httpx.Client, request: HostileRequest, watching: Sequence[Bystander], state: HostileSoak) -> None:
    """Send it, again if it held somebody up, and note what came of it."""
    gaps = [_send(http, request, watching, state)]
    while len(gaps) < 3 and gaps[0] > LONGEST_GAP_SECONDS:
        gaps.append(_send(http, request, watching, state))
    state.gaps[request.kind] = max(state.gaps.get(request.kind, 0.0), sorted(gaps)[len(gaps) // 2])
    held_up = sum(gap > LONGEST_GAP_SECONDS for gap in gaps)
    if held_up > 1:
        shown = ", ".join(f"{gap:.2f}" for gap in gaps)
        state.failures.append(f"{request.kind} ({len(request.body)} bytes) held others up for {shown} s")
    elif held_up:
        state.held_up_once[request.kind] += 1


def _send(http: httpx.Client, request: HostileRequest, watching: Sequence[Bystander], state: HostileSoak) -> float:
    began = time.monotonic()
    headers = {"content-type": "application/json"}
    try:
        answer = http.post(request.path, content=request.body, headers=headers)
    except httpx.HTTPError as error:
        state.failures.append(f"{request.kind} ({len(request.body)} bytes) got no answer: {type(error).__name__}")
    else:
        state.answered[str(answer.status_code)] += 1
        if answer.status_code >= 500 and answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            state.failures.append(f"{request.kind} ({len(request.body)} bytes) got {answer.status_code}")
    time.sleep(AFTERWARDS_SECONDS)
    return max(each.largest_gap(began) for each in watching)


def too_large(root: int) -> str:
    """Which process of a `stageline up` holds more than it may."""
    grown = [f"{one.role} holds {one.resident // MEBIBYTE} MiB" for one in vitals_of(root) if one.resident > MOST_BYTES]
    return "; ".join(grown)


def report_lines(state: HostileSoak) -> list[str]:
    """For a person, failures last."""
    worst = sorted(state.gaps.items(), key=lambda item: -item[1])[:5]
    statuses = ", ".join(f"{status} {count}" for status, count in sorted(state.answered.items()))
    return [
        f"hostile: seed {state.seed}, {state.answered.total()} bodies sent; answers: {statuses or 'none'}",
        f"  largest gaps: {', '.join(f'{kind} {gap * 1000:.0f} ms' for kind, gap in worst) or 'none'}",
        f"  held up once and not again: {state.held_up_once.total()}",
        f"hostile failures: {len(state.failures)}",
        *(f"  {failure}" for failure in state.failures[:20]),
    ]
