"""Kills and stops the processes of a `stageline up`, at moments and in ways drawn from a seed.

A process is killed, or stopped (SIGSTOP) for less than the step timeout, or for longer: a stage's group is replaced
then. Some blows fall while a group is still coming back from the one before.
"""

import asyncio
import math
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import httpx

from chaos.soak_vitals import incarnation_of, role_of
from processes.serving_command import ServingCommand, descendants
from stageline_local.session.instance import process_start_ticks

STEP_SECONDS: Final = 10
"""The model's step timeout."""
BRIEFLY: Final = (0.2, 4.0)
TOO_LONG: Final = (20.0, 30.0)
BETWEEN_SECONDS: Final = (1.0, 12.0)
RECOVERY_SECONDS: Final = 180.0
"""More is a failure, also where the machine is busy."""
_CALM_SHARE: Final = 0.6
"""Of the blows: those that wait until everything is back."""
_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Blow:
    """A way to disturb: how many processes of which kind, and for how long they are stopped; None kills them."""

    name: str
    weight: int
    kinds: tuple[str, ...]
    stopped_seconds: tuple[float, float] | None = None
    in_one_group: bool = True


BLOWS: Final = (
    Blow("stage killed", 4, ("stage",)),
    Blow("engine killed", 3, ("engine",)),
    Blow("stage and engine killed", 1, ("stage", "engine")),
    Blow("two groups killed", 1, ("stage", "stage"), in_one_group=False),
    Blow("gateway killed", 3, ("gateway",)),
    Blow("stage stopped briefly", 2, ("stage",), BRIEFLY),
    Blow("engine stopped briefly", 2, ("engine",), BRIEFLY),
    Blow("gateway stopped briefly", 1, ("gateway",), BRIEFLY),
    Blow("stage stopped too long", 1, ("stage",), TOO_LONG),
    Blow("engine stopped too long", 1, ("engine",), TOO_LONG),
)


@dataclass(frozen=True, slots=True)
class Victim:
    """A process of a serving command. The gateway belongs to no group: -1."""

    pid: int
    start_ticks: int
    kind: str
    group: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """How long it took from a blow until what it hit was ready again."""

    blow: str
    seconds: float


@dataclass
class Disturber:
    """`blows` counts by name. `say` hears of each blow, `failures` has what did not come back."""

    served: ServingCommand
    rng: random.Random
    say: Callable[[str], None]
    blows: list[str] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _away: list[list[float]] = field(default_factory=list)
    """When the gateway was dead: from, until."""
    _under_way: set[asyncio.Task[None]] = field(default_factory=set)

    def was_away(self, began: float, ended: float) -> bool:
        """Whether the gateway was dead at some time between two moments."""
        return any(start <= ended and began <= stop for start, stop in self._away)

    async def disturb_for(self, seconds: float) -> None:
        """Strike again and again; returns when the last thing hit is back."""
        until = time.monotonic() + seconds
        try:
            while True:
                await asyncio.sleep(self.rng.uniform(*BETWEEN_SECONDS))
                if self.rng.random() < _CALM_SHARE:
                    await asyncio.gather(*self._under_way)
                if time.monotonic() >= until:
                    break
                self._strike(self.rng.choices(BLOWS, [blow.weight for blow in BLOWS])[0])
            await asyncio.gather(*self._under_way)
        finally:
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)

    def _strike(self, blow: Blow) -> None:
        victims = self.choose(blow, living(self.served.process.pid))
        if not victims:
            return
        self.blows.append(blow.name)
        seconds = None if blow.stopped_seconds is None else self.rng.uniform(*blow.stopped_seconds)
        whom = ", ".join(_named(victim) for victim in victims)
        self.say(f"{blow.name}: {whom}" + ("" if seconds is None else f", for {seconds:.1f} s"))
        task = asyncio.create_task(self._hit(blow, victims, seconds))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def choose(self, blow: Blow, alive: Sequence[Victim]) -> list[Victim]:
        """Whom a blow hits; empty when there is nobody of the kind just now."""
        groups = sorted({victim.group for victim in alive if victim.group >= 0})
        if len(groups) < (1 if blow.in_one_group else len(blow.kinds)):
            return []
        chosen = [self.rng.choice(groups)] * len(blow.kinds) if blow.in_one_group else groups
        found = []
        for kind, group in zip(blow.kinds, chosen, strict=False):
            candidates = [victim for victim in alive if victim.kind == kind and victim.group in (group, -1)]
            if not candidates:
                return []
            found.append(self.rng.choice(candidates))
        return found

    async def _hit(self, blow: Blow, victims: Sequence[Victim], seconds: float | None) -> None:
        began = time.monotonic()
        away = [began, math.inf]
        if seconds is None and victims[0].kind == "gateway":
            self._away.append(away)
        if seconds is None:
            for victim in victims:
                send(victim, signal.SIGKILL)
        else:
            await stop_for(victims, seconds)
        if seconds is None or seconds > STEP_SECONDS:
            # A stopped one counts as back from when its stop was over, unless its group was replaced before.
            must_be_new = seconds is None
            await asyncio.gather(*(self._wait_back(blow, victim, began, must_be_new) for victim in victims))
        away[1] = time.monotonic()

    async def _wait_back(self, blow: Blow, victim: Victim, began: float, must_be_new: bool) -> None:
        oldest = victim.incarnation + must_be_new
        async with httpx.AsyncClient(base_url=self.served.url, timeout=5.0, trust_env=False) as client:
            while not await is_back(client, victim.group, oldest):
                if time.monotonic() - began > RECOVERY_SECONDS:
                    self.failures.append(f"{blow.name}: {_named(victim)} is not back after {RECOVERY_SECONDS:g} s")
                    return
                await asyncio.sleep(_LOOK_SECONDS)
        self.recoveries.append(Recovery(blow.name, time.monotonic() - began))


def living(root: int) -> list[Victim]:
    """The processes of a serving command that may be hit."""
    found = []
    for pid in sorted(descendants(root)):
        words, ticks = role_of(pid).split(), process_start_ticks(pid)
        if words and ticks is not None:
            group = int(words[1]) if len(words) > 1 else -1
            found.append(Victim(pid, ticks, words[2] if len(words) > 1 else words[0], group, incarnation_of(pid)))
    return found


def send(victim: Victim, number: signal.Signals) -> None:
    """Signal a process if it is still the same one."""
    if process_start_ticks(victim.pid) == victim.start_ticks:
        with suppress(ProcessLookupError):
            os.kill(victim.pid, number)


async def stop_for(victims: Sequence[Victim], seconds: float) -> None:
    """Stop processes for a while; they go on also when this is cancelled."""
    try:
        for victim in victims:
            send(victim, signal.SIGSTOP)
        await asyncio.sleep(seconds)
    finally:
        for victim in victims:
            send(victim, signal.SIGCONT)


async def is_back(client: httpx.AsyncClient, group: int, oldest: int) -> bool:
    """Whether the gateway sends requests to a group in an incarnation of at least `oldest`; -1: whether it answers."""
    try:
        if group < 0:
            return (await client.get("/healthz")).is_success
        listed = (await client.get("/v1/models")).json()["data"]
    except (httpx.HTTPError, ValueError, KeyError):
        return False
    groups = [one for model in listed for one in model["groups"] if one["ready"]]
    return any(one["group"] == group and one["incarnation"] >= oldest for one in groups)


def _named(victim: Victim) -> str:
    where = "" if victim.group < 0 else f" of group {victim.group}, incarnation {victim.incarnation}"
    return f"{victim.kind}{where} (pid {victim.pid})"
