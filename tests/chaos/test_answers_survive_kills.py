"""Stages and engines are killed at random moments, and every answer is the one it would have been.

`stageline up` serves a tiny model with real processes. The same requests, half greedy and half seeded, are
streamed twice: undisturbed, then while processes are killed, each kill at a moment drawn by a seed and counted in
tokens relayed since the last one, so that it falls into running answers. Answers are compared as `chaos.answers` says.
"""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from chaos.answers import MOST_NEAR_TIES, different, incomplete, num_parted, request
from chaos.clients import stream_all
from chaos.groups import DEADLINE_SECONDS, ChaosGroups, serving_tiny

TOKENS = 48
AT_ONCE = 12


def bodies(count: int) -> list[dict[str, Any]]:
    """The requests; some prompts share their beginning."""
    return [request(index, TOKENS, f"{'the ' * (index % 7)}story number {index}") for index in range(count)]


@dataclass
class Killer:
    """Kills one stage or engine whenever enough tokens have been relayed since the last kill."""

    groups: ChaosGroups
    rng: random.Random
    kills: int
    tokens_between: tuple[int, int]
    killed: list[str] = field(default_factory=list)
    _left: int = 0

    def __post_init__(self) -> None:
        self._left = self.rng.randint(*self.tokens_between)

    def count(self, tokens: int) -> None:
        """Tokens were relayed."""
        self._left -= tokens
        if self._left <= 0 and len(self.killed) < self.kills:
            self._left = self.rng.randint(*self.tokens_between)
            self._kill_one()

    def _kill_one(self) -> None:
        if members := self.groups.members():
            victim = self.rng.choice(members)
            self.killed.append(victim.role)
            victim.kill()


def run_twice(groups: ChaosGroups, num_requests: int, killer: Killer) -> None:
    """All requests undisturbed, then with the killer about; fails with what differs."""
    requests = bodies(num_requests)
    undisturbed = asyncio.run(stream_all(groups.served.url, requests, AT_ONCE))
    assert not (broken := incomplete(requests, undisturbed)), broken
    disturbed = asyncio.run(stream_all(groups.served.url, requests, AT_ONCE, killer.count))
    story = f"killed {killer.killed}\n{groups.story()}"
    assert not (broken := incomplete(requests, disturbed)), f"{broken}\n{story}"
    assert not (found := different(requests, undisturbed, disturbed, groups.model)), f"{found}\n{story}"
    parted = num_parted(undisturbed, disturbed)
    assert parted <= MOST_NEAR_TIES, f"{parted} answers parted at near ties\n{story}"
    assert len(killer.killed) == killer.kills, story
    resumed = sum(seen.usage.get("stageline_resumes", 0) for seen in disturbed)
    assert resumed >= killer.kills, f"only {resumed} answers were caught by {story}"


@pytest.fixture(autouse=True)
def patience_for_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGELINE_GATEWAY_HOLD_SECONDS", str(DEADLINE_SECONDS))


@pytest.mark.timeout(1500)
@pytest.mark.soak
def test_two_groups_and_kills_all_along(tmp_path: Path) -> None:
    with serving_tiny(tmp_path, replicas=2, engine=", maxNumSeqs: 8") as groups:
        run_twice(groups, 200, Killer(groups, random.Random(7), kills=6, tokens_between=(600, 1600)))


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_one_group_that_comes_back_in_time(tmp_path: Path) -> None:
    with serving_tiny(tmp_path, replicas=1, engine=", maxNumSeqs: 8") as groups:
        run_twice(groups, 80, Killer(groups, random.Random(11), kills=2, tokens_between=(600, 1600)))
