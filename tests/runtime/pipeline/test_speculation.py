"""Drafts change when tokens come and never which: real groups in float32, with and without, at any stage count."""

import json
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from oracles.pipeline_checks import draw_prompts, open_stream, samples, stage_samples
from oracles.tiny_models import VOCAB_SIZE
from processes import eager_drafts_engine
from processes.running_group import ENGINE_COMMAND, RunningGroup, page, running_group
from stageline_api import ports
from stageline_api.engine_http import GenerateRequest, SamplingParams, TokenPrompt
from stageline_api.telemetry.timeline import TimelinePage, TimelineStep

CONFIG: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 6, "max_num_batched_tokens": 64}
DRAFTS = {"tokens": 15, "min_match": 1}
LOOKUP, MODEL = "lookup", "draft"
FEW = dict.fromkeys(range(70, 73), 40.0)
"""A bias that leaves three letters, so that what comes was mostly there before."""
SCHEMA = '{"type":"array","items":{"enum":["abab","ba"]},"minItems":6,"maxItems":9}'
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logit_bias": FEW},
    "greedy-of-all": {"temperature": 0.0},
    "greedy-with-logprobs": {"temperature": 0.0, "top_logprobs": 2, "logit_bias": FEW},
    "free": {"temperature": 1.0, "logit_bias": FEW},
    "sampled-with-logprobs": {"temperature": 0.6, "top_logprobs": 1, "logit_bias": FEW},
    "top-p": {"temperature": 0.9, "top_p": 0.6, "logit_bias": FEW},
    "top-k": {"temperature": 1.2, "top_k": 3, "choice": 2},
    "min-p": {"temperature": 1.0, "min_p": 0.4},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.02},
    "frequency": {"temperature": 0.7, "frequency_penalty": 0.3, "presence_penalty": -0.5, "logit_bias": FEW},
    "penalised-with-logprobs": {"temperature": 0.0, "presence_penalty": 0.4, "top_logprobs": 1, "logit_bias": FEW},
    "schema": {"temperature": 0.8, "json_schema": SCHEMA, "ignore_eos": False, "max_tokens": 90},
    "schema-greedy": {"temperature": 0.0, "json_schema": SCHEMA, "ignore_eos": False, "max_tokens": 90},
    "least-length": {
        "temperature": 1.0,
        "logit_bias": FEW,
        "ignore_eos": False,
        "stop_token_ids": (70,),
        "min_tokens": 20,
    },
    "banned-words": {"temperature": 0.0, "logit_bias": FEW, "bad_words": ("CC", "CDE")},
    "one-token": {"temperature": 0.0, "max_tokens": 1},
    "two-tokens": {"temperature": 0.0, "max_tokens": 2},
    "short": {"temperature": 0.0, "max_tokens": 11},
}
Answer = tuple[str, list[int], list[Any], dict[str, Any]]


def repeating_prompts() -> list[tuple[int, ...]]:
    return [prompt * 3 for prompt in draw_prompts(len(OPTIONS), VOCAB_SIZE, 24)]


def sampling_of(index: int, **changes: Any) -> SamplingParams:
    options = list(OPTIONS.values())[index]
    return SamplingParams(**({"seed": index, "max_tokens": 48, "ignore_eos": True} | options | changes))


def answer(group: RunningGroup, prompt: tuple[int, ...], sampling: SamplingParams, **fields: Any) -> Answer:
    """Text, ids, log probabilities and end of one stream."""
    request = GenerateRequest(
        request_id=secrets.token_hex(8), prompt=TokenPrompt(token_ids=prompt), sampling=sampling, **fields
    )
    with (
        httpx.Client(timeout=300.0) as client,
        client.stream("POST", f"{group.url}/v1/generate", content=request.to_json()) as response,
    ):
        assert response.status_code == 200, response.read().decode()
        events = [json.loads(line) for line in response.iter_lines() if line]
    deltas = [event for event in events if event["type"] == "delta"]
    end = {name: events[-1].get(name) for name in ("type", "reason", "message", "prompt_tokens", "completion_tokens")}
    return (
        "".join(event["text"] for event in deltas),
        [token for event in deltas for token in event["token_ids"]],
        [each for event in deltas for each in event.get("logprobs", ())],
        end,
    )


def all_answers(group: RunningGroup, samplings: list[SamplingParams]) -> list[Answer]:
    """Half of them one at a time, half of them at once."""
    cases = list(zip(repeating_prompts(), samplings, strict=True))
    alone = [answer(group, *case) for case in cases[::2]]
    with ThreadPoolExecutor(max_workers=len(cases)) as pool:
        together = list(pool.map(lambda case: answer(group, *case), cases[1::2]))
    return [answer for pair in zip(alone, [*together, *alone], strict=False) for answer in pair][: len(cases)]


def check_equal(found: Answer, expected: Answer, name: str) -> None:
    assert found[:2] == expected[:2], name
    assert found[3] == expected[3], name
    assert len(found[2]) == len(expected[2]), name
    for one, other in zip(found[2], expected[2], strict=True):
        assert (one["token_id"], one["bytes"]) == (other["token_id"], other["bytes"]), name
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3), name
        assert [top["token_id"] for top in one["top_logprobs"]] == [top["token_id"] for top in other["top_logprobs"]]


@pytest.fixture(scope="module")
def plain(early_exit: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGroup]:
    """One stage, without drafts."""
    with running_group(tmp_path_factory.mktemp("plain"), early_exit[0], 1, **CONFIG) as group:
        yield group


@pytest.fixture(scope="module")
def expected(plain: RunningGroup) -> list[Answer]:
    return all_answers(plain, [sampling_of(index) for index in range(len(OPTIONS))])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, LOOKUP), marks=pytest.mark.soak),
        (2, LOOKUP),
        pytest.param((3, LOOKUP), marks=pytest.mark.soak),
        pytest.param((4, LOOKUP), marks=pytest.mark.soak),
        pytest.param((1, MODEL), marks=pytest.mark.soak),
        pytest.param((2, MODEL), marks=pytest.mark.thorough),
        pytest.param((3, MODEL), marks=pytest.mark.soak),
        pytest.param((4, MODEL), marks=pytest.mark.soak),
        pytest.param((2, LOOKUP, 2), marks=pytest.mark.soak),
        pytest.param((2, MODEL, 2), marks=pytest.mark.thorough),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def drafting(
    request: pytest.FixtureRequest, early_exit: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGroup]:
    """Of so many stages, with such drafts, of so many ranks a stage."""
    stage_count, method, *ranks = request.param
    target, draft = early_exit
    by_model = {"draft_source": f"file://{draft}"} if method == MODEL else {}
    # A tiny model's steps are hardly longer than its draft model's; what real ones cost decides in the lookup's groups.
    engine = eager_drafts_engine.COMMAND if method == MODEL else ENGINE_COMMAND
    directory = tmp_path_factory.mktemp("drafting")
    given = CONFIG | {"speculative": DRAFTS | by_model, "tensor": ranks[0] if ranks else 1}
    with running_group(directory, target, stage_count, engine_command=engine, **given) as group:
        yield group


def by_model(group: RunningGroup) -> bool:
    return group.engine_command == eager_drafts_engine.COMMAND


def counted(group: RunningGroup, name: str) -> float:
    return sum(samples(f"{group.url}/metrics").get(f"stageline_engine_{name}_total", {}).values())


def test_every_option_gives_the_same_answer(drafting: RunningGroup, expected: list[Answer]) -> None:
    found = all_answers(drafting, [sampling_of(index) for index in range(len(OPTIONS))])
    for name, one, other in zip(OPTIONS, found, expected, strict=True):
        check_equal(one, other, name)
    drafted, accepted = counted(drafting, "draft_tokens"), counted(drafting, "accepted_tokens")
    assert drafted > accepted > 30, f"{accepted} of {drafted} drafts: the answers show too little"
    assert counted(drafting, "accepted_tokens_per_position") == accepted
    busy = stage_samples(drafting, len(drafting.addresses) - 1)["stageline_stage_busy_seconds_total"]
    assert (busy.get(("draft",), 0.0) > 0.0) == by_model(drafting), busy
    steps = counted(drafting, "plans")
    assert steps < sum(len(tokens) for _, tokens, _, _ in expected), f"{steps} plans"


def timeline_of(group: RunningGroup, stage: int) -> list[TimelineStep]:
    """The plans that a stage still tells of."""
    steps: list[TimelineStep] = []
    since, more = -1, True
    while more:
        address = f"http://{group.addresses[stage]}:{ports.STAGE_HEALTH}"
        shown = TimelinePage.model_validate_json(page(f"{address}/timeline?since_seq={since}").content)
        steps += shown.steps
        since, more = steps[-1].seq, shown.more
    return steps


def test_timelines_show_what_was_verified_and_drafted(drafting: RunningGroup) -> None:
    """Each stage tells what a plan verified; the last one what was drafted."""
    for index in range(0, len(OPTIONS), 4):
        answer(drafting, repeating_prompts()[index], sampling_of(index))
    found = [timeline_of(drafting, stage) for stage in range(len(drafting.addresses))]
    for steps in found:
        assert any(step.drafts for step in steps), "no plan verified anything"
    drafted = {mark.state for step in found[-1] for mark in step.marks} & {"busy.draft"}
    assert bool(drafted) == by_model(drafting)


@pytest.mark.thorough
def test_stops_within_a_draft_end_the_answer_there(drafting: RunningGroup, plain: RunningGroup) -> None:
    """Strings where most drafts hold, tokens where few do."""
    prompt = (70, 71, 72, 73) * 6
    letters = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias=FEW)
    whatever = SamplingParams(temperature=0.0, max_tokens=40)
    text, _, _, _ = answer(plain, prompt, letters)
    _, tokens, _, _ = answer(plain, prompt, whatever)
    strings = {text[2:end] for end in range(6, len(text), 6)}
    stops = [structs.replace(letters, stop=(string,)) for string in strings]
    stops += [structs.replace(whatever, stop_token_ids=(token,)) for token in tokens[4::6]]
    assert len(stops) >= 10, (text, tokens)
    before = counted(drafting, "accepted_tokens")
    for sampling in stops:
        check_equal(answer(drafting, prompt, sampling), answer(plain, prompt, sampling), str(sampling))
    assert counted(drafting, "accepted_tokens") > before


def test_answers_go_on_from_every_token(drafting: RunningGroup, expected: list[Answer]) -> None:
    """Another engine's tokens count as known: what is looked up, penalised and followed in the grammar."""
    names = list(OPTIONS)
    for name in ("greedy", "frequency", "schema"):
        index = names.index(name)
        text, tokens, _, end = expected[index]
        for border in range(1, len(tokens) - 1, 7):
            given = tuple(tokens[:border])
            found = answer(drafting, repeating_prompts()[index], sampling_of(index), generated_token_ids=given)
            assert [*given, *found[1]] == tokens, (name, border)
            assert text.endswith(found[0])
            assert found[3] == end


def test_clients_that_leave_leave_nothing_behind(drafting: RunningGroup, expected: list[Answer]) -> None:
    for _ in range(3):
        with open_stream(drafting, repeating_prompts()[0], sampling_of(0, max_tokens=400)) as stream:
            stream.next_event()
            stream.next_event()
    drafting.wait_until(lambda: drafting.engine_status()["requests_running"] == 0, "the streams are forgotten")
    check_equal(answer(drafting, repeating_prompts()[0], sampling_of(0)), expected[0], "greedy")
