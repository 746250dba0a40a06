"""Kills where no token flows, stages that stand still, drains: every answer is still the one it would have been.

`test_answers_survive_kills` kills while answers run. Here the processes are frozen first, so that each kill surely
falls into a start, a queue or a prompt. The answers are streamed disturbed first, and undisturbed afterwards: what the
groups hold of the prompts by then could spare them the reading.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from chaos.answers import MOST_NEAR_TIES, different, incomplete, num_parted, request
from chaos.clients import Seen, Traffic, stream_all, streaming
from chaos.comebacks import freeze_newcomers, hold_load, hold_rendezvous, hold_warm_up, kill
from chaos.groups import DEADLINE_SECONDS, ENGINE, FIRST, LAST, ChaosGroups, Member, serving_tiny
from processes.serving_command import engine_authorization

pytestmark = [pytest.mark.timeout(1500), pytest.mark.thorough]
CONTEXT_TOKENS = 1024
PLACES = 4
"""Requests that a group runs at once; others wait in its queue."""
CHUNK_TOKENS = 16
STEP_SECONDS = 16
"""How long a group may stand still before it is replaced."""


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosGroups]:
    """Two groups that restart quickly."""
    engine = f", maxNumSeqs: {PLACES}, maxNumBatchedTokens: {CHUNK_TOKENS}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGELINE_GATEWAY_HOLD_SECONDS", str(DEADLINE_SECONDS))
        patch.setenv("STAGELINE_GATEWAY_DRAIN_PATIENCE_SECONDS", "0.1")
        # A busy machine may be slow to answer a probe; a stage that stands still for a second must not look lost then.
        patch.setenv("STAGELINE_GATEWAY_PROBE_SECONDS", "6")
        directory = tmp_path_factory.mktemp("moments")
        with serving_tiny(
            directory, 2, engine, f", stepSeconds: {STEP_SECONDS}, rendezvousSeconds: 600", CONTEXT_TOKENS
        ) as groups:
            yield groups


def bodies(count: int, tokens: int, name: str, words: int = 3) -> list[dict[str, Any]]:
    """Requests with prompts of their own, too short for the gateway to keep them to one group."""
    return [request(index, tokens, f"{name} {index}: {'and the ' * words}") for index in range(count)]


def check(groups: ChaosGroups, asked: Sequence[dict[str, Any]], disturbed: Sequence[Seen]) -> None:
    """The answers are all there, and what the same requests get undisturbed; by then some group is back."""
    assert not (broken := incomplete(asked, disturbed)), f"{broken}\n{groups.story()}"
    undisturbed = asyncio.run(stream_all(groups.served.url, asked, len(asked)))
    assert not (broken := incomplete(asked, undisturbed)), f"{broken}\n{groups.story()}"
    assert not (found := different(asked, undisturbed, disturbed, groups.model)), f"{found}\n{groups.story()}"
    assert (parted := num_parted(undisturbed, disturbed)) <= MOST_NEAR_TIES, f"{parted} answers parted at near ties"


@contextmanager
def caught_midway(groups: ChaosGroups, group: int, asked: Sequence[dict[str, Any]]) -> Iterator[tuple[Traffic, Member]]:
    """Answers of one length that are streamed, with a group's last stage frozen in the midst of its share of them.

    On a busy machine all of them may have ended before it stands still: then they are asked for again. One of those
    that run has a twelfth of its length or more (a third, shared by `PLACES`): a first token alone may still be held
    back as part of a character, and an answer of which nothing was sent starts anew instead of resuming.
    """
    stage, deadline, length = groups.member(group, LAST), time.monotonic() + DEADLINE_SECONDS, asked[0]["max_tokens"]
    while time.monotonic() < deadline:
        before = generated(groups, group)
        with streaming(groups.served.url, asked) as traffic:
            while not traffic.is_over:
                stage.freeze()
                try:
                    # Answers that have ended have brought whole lengths.
                    if traffic.tokens and 3 * ((generated(groups, group) - before) % length) >= length:
                        yield traffic, stage
                        return
                finally:
                    stage.thaw()
                time.sleep(0.02)
        assert not (broken := incomplete(asked, traffic.answers())), f"{broken}\n{groups.story()}"
    raise AssertionError(f"group {group} was never in the midst of an answer\n{groups.story()}")


def resumes(answers: Sequence[Seen]) -> int:
    """How often an answer went on in another run."""
    return sum(seen.usage.get("stageline_resumes", 0) for seen in answers)


def generated(groups: ChaosGroups, group: int) -> int:
    """Tokens that a group's engine has had of its stages."""
    status = groups.engine(group)
    assert status is not None, groups.story()
    return status.generation_tokens_total


def asked_of(groups: ChaosGroups, group: int) -> int:
    """Requests that a group's engine has, running and waiting."""
    status = groups.engine(group)
    assert status is not None, groups.story()
    return status.requests_running + status.requests_waiting


@pytest.mark.soak
def test_all_groups_at_once_and_again_in_every_phase_of_their_comeback(groups: ChaosGroups) -> None:
    groups.wait_ready(2)
    asked = bodies(12, 96, "comeback")
    with caught_midway(groups, 0, asked) as (traffic, _):
        now = {one.group: one.incarnation for one in groups.members()}
        for one in groups.members():
            if (one.group, one.role) in {(0, LAST), (1, ENGINE), (1, FIRST)}:
                one.kill()
        later = freeze_newcomers(groups, now)
        hold_rendezvous(groups, 0, later[0])
        tokens = traffic.tokens
        kill(groups, 0, later[0], FIRST)
        last = freeze_newcomers(groups, {0: later[0]})
        hold_warm_up(groups, 0, last[0])
        kill(groups, 0, last[0], ENGINE)
        hold_load(groups, 1, later[1])
        assert (traffic.tokens, traffic.is_over) == (tokens, False), f"some group answered\n{groups.story()}"
        kill(groups, 1, later[1], LAST)
        answers = traffic.answers()
    assert resumes(answers) >= 1, groups.story()
    check(groups, asked, answers)


def test_killed_while_a_prompt_is_read_and_others_wait(groups: ChaosGroups) -> None:
    groups.wait_ready(2)
    asked = bodies(4 * PLACES, 16, "prompt", words=28)
    half, victim = len(asked) // 2, groups.member(0, FIRST)
    steps = groups.stage_steps(0)
    frozen, other = groups.member(0, LAST), groups.member(1, LAST)
    for one in (frozen, other):
        one.freeze()
    with streaming(groups.served.url, asked) as traffic:
        # While neither makes tokens: requests that come late would go where some have been made already.
        groups.until(lambda: [asked_of(groups, group) for group in (0, 1)] == [half, half], "half of the requests each")
        other.thaw()
        groups.until(lambda: groups.stage_steps(0) >= steps + 2, "two chunks of a prompt")
        lost_before = groups.gateway_log().count("engine lost")
        victim.kill()
        frozen.thaw()
        answers = traffic.answers()
    assert groups.gateway_log().count("engine lost") - lost_before >= half, groups.story()
    assert resumes(answers) == 0, "none had begun"
    check(groups, asked, answers)


@pytest.mark.soak
def test_a_stage_that_stands_still_for_a_while_loses_nothing(groups: ChaosGroups) -> None:
    groups.wait_ready(2)
    asked = bodies(8, 96, "pause")
    lost_before = groups.gateway_log().count("engine lost")
    with caught_midway(groups, 0, asked) as (traffic, stage):
        time.sleep(1.0)  # what this is about: shorter than a step may take
        running = asked_of(groups, 0)
        stage.thaw()
        answers = traffic.answers()
    assert running, "nothing ran there"
    assert resumes(answers) == 0, groups.story()
    assert groups.gateway_log().count("engine lost") == lost_before, groups.story()
    assert groups.member(0, LAST) == stage, "the group was replaced"
    check(groups, asked, answers)


def test_a_stage_that_stands_still_for_too_long_is_replaced_and_answers_go_on(groups: ChaosGroups) -> None:
    groups.wait_ready(2)
    asked = bodies(8, 96, "stall")
    with caught_midway(groups, 0, asked) as (traffic, stage):
        answers = traffic.answers()
    assert resumes(answers) >= 1, groups.story()
    assert groups.member(0, LAST, since=stage.incarnation + 1), "the group was not replaced"
    check(groups, asked, answers)


def test_a_group_that_drains_for_too_long_hands_its_answers_over(groups: ChaosGroups) -> None:
    groups.wait_ready(2)
    asked = bodies(12, 96, "drain")
    endpoint = groups.endpoint(1)
    assert endpoint is not None, groups.story()
    # Frozen, its answers surely last for longer than the gateway's patience.
    with caught_midway(groups, 1, asked) as (traffic, stage):
        running, left_before = asked_of(groups, 1), groups.gateway_log().count("kind=left")
        headers = {"authorization": engine_authorization(groups.served.process.pid)}
        assert httpx.post(f"{endpoint.url}/v1/drain", headers=headers, timeout=60, trust_env=False).status_code == 202
        # At least: more of the twelve may have reached the group between the count and its drain.
        left = left_before + running
        groups.until(lambda: groups.gateway_log().count("kind=left") >= left, f"{running} answers left the group")
        stage.thaw()
        answers = traffic.answers()
    assert running, "nothing ran there"
    assert resumes(answers) >= 1, groups.story()
    check(groups, asked, answers)
    assert groups.member(1, LAST, since=stage.incarnation + 1), "the group was not made anew"
