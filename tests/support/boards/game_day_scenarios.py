"""What a game day does to a model that `stageline up` serves, and which alert must say so. `game_day` judges.

Every scenario serves SmolLM2 as two stages, asks more of it than it can answer, and breaks one thing. What takes a
cluster to break is in `cluster_game_day_scenarios`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import httpx

from processes.serving_command import ServingCommand, kill

Note = Callable[[str], None]
"""Writes a dated line of the log."""
RECOVERY_SECONDS: Final = 120.0
Broken = TypeVar("Broken")
"""What a scenario is given to break."""
USERS_WAIT: Final = frozenset({"StagelineFirstTokenBudgetBurn", "StagelineOutputTokenBudgetBurn"})
"""What pages whenever users wait, whatever the cause; the scenario's own alert says which."""


@dataclass(frozen=True)
class Scenario(Generic[Broken]):
    """`window_seconds` is how far back the alert's expression looks: so long it may take to see what begins now."""

    name: str
    title: str
    alert: str
    labels: dict[str, str]
    window_seconds: float
    act: Callable[[Broken, Note], Iterator[None]]
    """Yields when the thing is done; what follows the yield undoes it."""
    engine: dict[str, Any] = field(default_factory=dict)
    """`spec.engine` of the model, where a scenario has a model of its own."""
    says: str = ""
    """What the alert's description must say besides its labels."""
    beside: frozenset[str] = USERS_WAIT
    """Alerts that may fire beside it, because what was broken is their matter too; no others."""


def slow_stage(up: ServingCommand, note: Note) -> Iterator[None]:
    """Stage 1 runs a third of the time."""
    with asking(up, clients=80, prompt="Tell me a story.", max_tokens=64):
        pid = pid_of_stage(up, 1)
        note(f"80 clients ask without a pause for 64 slots; stage 1 (pid {pid}) is stopped for 60 of every 90 ms")
        with limping(pid, stopped_seconds=0.06, running_seconds=0.03):
            yield
        note("stage 1 runs freely again")


def killed_stage(up: ServingCommand, note: Note) -> Iterator[None]:
    """Stage 1 dies, its group comes back, and it dies again."""
    with asking(up, clients=2, prompt="Tell me a story.", max_tokens=64):
        seen = _kill_stage(up, note, "for the first time")
        up.wait_for(") is ready", RECOVERY_SECONDS, after=seen)
        note("the group is ready again")
        seen = _kill_stage(up, note, "for the second time")
        yield
        up.wait_for(") is ready", RECOVERY_SECONDS, after=seen)
        note("the group is ready again")


def _kill_stage(up: ServingCommand, note: Note, time_of_death: str) -> int:
    """Returns how long the output was before."""
    seen, pid = len(up.output()), pid_of_stage(up, 1)
    note(f"stage 1 (pid {pid}) gets SIGKILL {time_of_death}")
    kill(pid)
    up.wait_for("stage 1 of group 0 failed: Killed", 30, after=seen)
    note("`stageline up` says: stage 1 of group 0 failed: Killed")
    return seen


def full_cache(up: ServingCommand, note: Note) -> Iterator[None]:
    """Four requests of full length fill the cache; eight more wait."""
    prompt = prompt_of(up, 244)
    with asking(up, clients=12, prompt=prompt, max_tokens=10):
        note("12 clients ask with 244 tokens each for 10 more; the cache holds four sequences of 256")
        yield


def flooded_queue(up: ServingCommand, note: Note) -> Iterator[None]:
    """Far more requests than are answered."""
    with asking(up, clients=200, prompt="Tell me a story.", max_tokens=120):
        note("200 clients ask at once for 120 tokens each, and again as soon as they are answered")
        yield


def impatient_clients(up: ServingCommand, note: Note) -> Iterator[None]:
    """Nine of ten requests are given up by their clients before anything comes, and asked again."""
    with asking(up, clients=24, prompt="Tell me a story.", max_tokens=200, patience_seconds=3.0):
        note("24 clients ask for 200 tokens each where two are answered at a time, and give up after 3 s")
        yield


GROUP: Final = {"namespace": "default", "model": "smollm2", "group": "0"}
SCENARIOS: Final[tuple[Scenario[ServingCommand], ...]] = (
    Scenario(
        "slow-stage", "One stage is slow", "StagelineStageBottleneck", {**GROUP, "stage": "1"}, 300, slow_stage,
        {"maxNumSeqs": 64},
    ),
    Scenario(
        "killed-stage", "One stage is killed, twice", "StagelineGroupRestarting",
        {**GROUP, "stage": "1", "failure_class": "Killed"}, 30, killed_stage,
    ),
    Scenario(
        "full-cache", "The KV cache is full", "StagelineKVCacheExhausted", GROUP, 300, full_cache,
        {"maxNumSeqs": 4, "maxModelLen": 256, "prefixCache": False},
        beside=USERS_WAIT,
    ),
    Scenario(
        "flooded-queue", "More is asked than is answered", "StagelineRequestsQueuedTooLong",
        {"namespace": "default", "model_name": "smollm2"}, 300, flooded_queue, {"maxNumSeqs": 8},
        says="Requests wait in group 0 of smollm2, whose busiest stage, ",
    ),
    Scenario(
        "impatient-clients", "Clients give up before their first token", "StagelineRequestsAbandoned",
        {"namespace": "default", "model_name": "smollm2"}, 600, impatient_clients, {"maxNumSeqs": 2},
        beside=USERS_WAIT | {"StagelineRequestsQueuedTooLong"},  # too long for their patience: why they leave
    ),
)  # fmt: skip


def pid_of_stage(up: ServingCommand, stage: int) -> int:
    """The process of a stage of the only group."""
    wanted = f"STAGELINE_STAGE_INDEX={stage}".encode()
    for pid in up.stage_pids():
        if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no process of stage {stage}:\n{up.output()}")


@contextmanager
def limping(pid: int, stopped_seconds: float, running_seconds: float) -> Iterator[None]:
    """Stop and continue a process, again and again; it runs when this ends."""
    over = threading.Event()

    def _limp() -> None:
        while not over.wait(running_seconds):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stopped_seconds)
            os.kill(pid, signal.SIGCONT)

    limper = threading.Thread(target=_limp, daemon=True)
    limper.start()
    try:
        yield
    finally:
        over.set()
        limper.join()


@contextmanager
def asking(
    up: ServingCommand, clients: int, prompt: str, max_tokens: int, patience_seconds: float = 600.0
) -> Iterator[None]:
    """So many clients that ask again as soon as they are answered or give up; no answer is judged here."""
    over = threading.Event()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)

    def _ask(client: httpx.Client, number: int) -> None:
        body = {"model": "smollm2", "prompt": f"{number} {prompt}", "max_tokens": max_tokens, "ignore_eos": True}
        while not over.is_set():
            try:
                client.post("/v1/completions", json=body)
            except httpx.ReadTimeout:
                pass
            except httpx.HTTPError:
                over.wait(1.0)

    with httpx.Client(base_url=up.url, trust_env=False, timeout=patience_seconds, limits=limits) as client:
        askers = [
            threading.Thread(target=_ask, args=(client, number), daemon=True) for number in range(10, 10 + clients)
        ]
        for asker in askers:
            asker.start()
        try:
            yield
        finally:
            over.set()


def prompt_of(up: ServingCommand, tokens: int) -> str:
    """A text that, behind two digits and a space, has so many tokens."""
    words = tokens
    while True:
        text = " ".join(["the"] * words)
        body = {"model": "smollm2", "prompt": f"10 {text}"}
        answer = httpx.post(f"{up.url}/tokenize", json=body, trust_env=False, timeout=60.0)
        count = len(answer.raise_for_status().json()["tokens"])
        if count <= tokens:
            return text
        words -= count - tokens
