"""A request goes where most of its prompt is held, as far as engines say so; engines that know no names get none."""

from dataclasses import dataclass
from typing import Any

import pytest

from chaos.continued_answers import TEXT, read, rest_of
from processes.gateway_harness import MODEL, RunningGateway, eventually, group
from processes.scripted_engine import Drop, ScriptedEngine
from stageline_gateway.groups import routing

PROMPT = "You are a helpful assistant. " * 40
STREAM: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "stream": True}


def ask(gateway: RunningGateway, prompt: str, **fields: Any) -> None:
    answer = gateway.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text


@dataclass
class TwoGroups:
    gateway: RunningGateway
    engine: ScriptedEngine
    other: ScriptedEngine

    def probed(self) -> None:
        """Wait until the gateway has heard from both what they say now."""
        seen = [each.probes for each in (self.engine, self.other)]
        # An answer that was under way when it changed is followed by one that wasn't.
        eventually(
            lambda: all(each.probes >= count + 3 for each, count in zip((self.engine, self.other), seen, strict=True)),
            "the engines are not asked",
        )

    def counts(self) -> tuple[int, int]:
        return len(self.engine.requests), len(self.other.requests)


@pytest.fixture
def two(
    gateway: RunningGateway,
    engine: ScriptedEngine,
    other_engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> TwoGroups:
    # What was sent counts as held for seconds: here no longer than until the next probe.
    monkeypatch.setattr(routing, "SENT_SECONDS", 0.0)
    for each in (engine, other_engine):
        each.held, each.slots = (), 16
    gateway.serve(group(engine.url, 0), group(other_engine.url, 1))
    both = TwoGroups(gateway, engine, other_engine)
    both.probed()
    return both


@pytest.mark.parametrize("holder", [0, 1])
def test_the_group_that_holds_the_prompt_gets_it(two: TwoGroups, holder: int) -> None:
    ask(two.gateway, PROMPT)
    [first] = [*two.engine.requests, *two.other.requests]
    engines = (two.engine, two.other)
    # Of what the request named, one engine says that it holds all but the last, and long before that.
    names = tuple(name for name, _ in first.prefixes)
    assert names, "engines that tell are told"
    before = two.counts()
    engines[holder].held, engines[1 - holder].held = names[:-1], names[:1]
    two.probed()
    for _ in range(3):
        ask(two.gateway, PROMPT)
    got = [after - count for after, count in zip(two.counts(), before, strict=True)]
    assert got[holder] == 3, got


def test_a_group_whose_engine_is_full_of_others_requests_is_passed_over(two: TwoGroups) -> None:
    ask(two.gateway, PROMPT)
    taken = 0 if two.engine.requests else 1
    engines = (two.engine, two.other)
    engines[taken].running = 16
    two.probed()
    ask(two.gateway, PROMPT)
    assert len(engines[1 - taken].requests) == 1, "sixteen of another gateway's requests run there"


def test_the_only_group_of_a_model_is_told_none(gateway: RunningGateway, engine: ScriptedEngine) -> None:
    gateway.serve(group(engine.url, 0))
    eventually(lambda: engine.probes >= 3, "not probed")
    ask(gateway, PROMPT)
    assert [each.prefixes for each in engine.requests] == [()]


@pytest.mark.parametrize("weights", ["same", "other", ""])
def test_an_answer_goes_on_with_the_weights_it_began_with_alone(two: TwoGroups, weights: str) -> None:
    """An engine that doesn't say is believed: it may be of a version that says nothing."""
    engines = (two.engine, two.other)
    for each in engines:
        each.script = lambda request: rest_of(request) if request.generated_token_ids else rest_of(request, Drop(), 3)
    # Which of them is the first is the gateway's choice, and the same for the same prompt.
    with two.gateway.http.stream("POST", "/v1/completions", json=STREAM) as streaming:
        streaming.read()
    first = 0 if not two.engine.requests[0].generated_token_ids else 1
    engines[first].weights, engines[1 - first].weights = "same", weights
    two.probed()
    before = two.counts()
    with two.gateway.http.stream("POST", "/v1/completions", json=STREAM) as streaming:
        seen = read("".join(streaming.iter_text()))
    asked = [after - count for after, count in zip(two.counts(), before, strict=True)]
    assert asked[first] == 1, "the same prompt begins where it did before"
    if weights == "other":
        assert (asked[1 - first], len(seen.errors)) == (0, 1), seen
    else:
        assert (asked[1 - first], seen.text, seen.errors) == (1, TEXT, []), seen
