"""Answers with drafts whose group runs out of cache, drains, or loses a stage: token for token those without drafts."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from chaos.group_endings import assert_all_name
from oracles.pipeline_checks import OpenStream, Prompt, draw_prompts, open_stream, samples
from oracles.tiny_models import VOCAB_SIZE
from processes import eager_drafts_engine
from processes.running_group import ENGINE_COMMAND, RunningGroup, running_group
from processes.small_machines import short_stage_command
from stageline_api.engine_http import GenerateRequest, SamplingParams, TokenPrompt

LOOKUP, MODEL = "lookup", "draft"
CONFIG: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 160}
FEW = dict.fromkeys(range(70, 73), 40.0)
"""A bias that leaves three letters, so that what comes was mostly there before."""
NUM_BLOCKS = 20
"""Room for two whole sequences, and eight slots."""
PROMPT: Prompt = (70, 71, 72, 71) * 5
URGENT: Prompt = (70, 71, 72, 71, 73) * 28
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logit_bias=FEW)
LONG = SamplingParams(temperature=0.8, seed=5, max_tokens=120, ignore_eos=True, logit_bias=FEW)


def drafting(method: str, early_exit: tuple[Path, Path]) -> dict[str, Any]:
    """What makes a group draft: its config, and an engine that does so however fast tiny models run here."""
    settings: dict[str, Any] = {"tokens": 15, "min_match": 1}
    if method == MODEL:
        settings["draft_source"] = f"file://{early_exit[1]}"
        return {"speculative": settings, "engine_command": eager_drafts_engine.COMMAND}
    return {"speculative": settings, "engine_command": ENGINE_COMMAND}


@pytest.fixture(scope="module")
def plain(early_exit: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGroup]:
    """One stage, without drafts, and cache for everybody."""
    with running_group(tmp_path_factory.mktemp("plain"), early_exit[0], 1, **CONFIG) as group:
        yield group


def drafted(group: RunningGroup) -> tuple[float, float]:
    """Drafts of the group so far, and those that held."""
    figures = samples(f"{group.url}/metrics")
    return figures["stageline_engine_draft_tokens_total"][()], figures["stageline_engine_accepted_tokens_total"][()]


def cases() -> tuple[list[Prompt], list[SamplingParams]]:
    """Three choices of each of four prompts that repeat themselves, greedy, sampled and penalised.

    Some take longer than others: in the end few are left, and a step has room for drafts.
    """
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 0.0, "frequency_penalty": 0.2},
    ]
    prompts = [prompt * 3 for prompt in draw_prompts(4, VOCAB_SIZE, 12)]
    samplings = [
        SamplingParams(
            seed=index // 3, choice=index % 3, max_tokens=45 + 5 * index, ignore_eos=True, logit_bias=FEW, **one
        )
        for index, one in enumerate(options * 4)
    ]
    return [prompt for prompt in prompts for _ in options], samplings


def long_cases() -> tuple[list[Prompt], list[SamplingParams]]:
    """Twice as many long answers as the cache has room to begin; each prompt fills a block and begins another."""
    samplings = [structs.replace(LONG, seed=seed) for seed in range(12)]
    return [PROMPT] * len(samplings), samplings


def answers_beside_an_urgent_one(group: RunningGroup) -> list[list[int]]:
    """The long answers, and one of a higher priority that comes when they hold most of the cache and needs half of it.

    Whether requests of one priority take slots from each other depends on when they end; it does take some.
    """
    prompts, samplings = long_cases()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(group.generate, *each) for each in zip(prompts, samplings, strict=True)]
        group.wait_until(lambda: group.engine_status().get("requests_running", 0) >= 4, "long answers under way")
        with open_stream(group, URGENT, SHORT, priority=-1) as stream:
            urgent = [token for event in stream.rest() for token in event.get("token_ids", [])]
        return [*(answer.result() for answer in answers), urgent]


@pytest.mark.parametrize("method", [LOOKUP, pytest.param(MODEL, marks=pytest.mark.soak)])
def test_nobody_gets_other_tokens_for_want_of_cache(
    plain: RunningGroup, early_exit: tuple[Path, Path], method: str, tmp_path: Path
) -> None:
    prompts, samplings = cases()
    expected = plain.generate_all(prompts, samplings)
    expected_long = plain.generate_all(*long_cases())
    command = short_stage_command(NUM_BLOCKS)
    with running_group(
        tmp_path, early_exit[0], 2, stage_command=command, **drafting(method, early_exit), **CONFIG
    ) as short:
        assert short.generate_at_once(prompts, samplings) == expected
        assert answers_beside_an_urgent_one(short) == [*expected_long, plain.generate(URGENT, SHORT)]
        assert samples(f"{short.url}/metrics")["stageline_preemptions_total"][()] > 0, "cache never ran out"
        assert drafted(short)[1] > 0, drafted(short)


def read_tokens(stream: OpenStream, at_least: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < at_least:
        event = stream.next_event()
        assert event["type"] in ("admitted", "delta"), event
        tokens += event.get("token_ids", [])
    return tokens


@pytest.mark.parametrize("method", [pytest.param(LOOKUP, marks=pytest.mark.soak), MODEL])
def test_a_group_that_drains_finishes_its_drafts(
    plain: RunningGroup, early_exit: tuple[Path, Path], method: str, tmp_path: Path
) -> None:
    expected = plain.generate(PROMPT, LONG)
    with running_group(tmp_path, early_exit[0], 2, **drafting(method, early_exit), **CONFIG) as group:
        with open_stream(group, PROMPT, LONG) as stream:
            tokens = read_tokens(stream, 10)
            group.processes["stage-1"].send_signal(signal.SIGTERM)
            events = stream.rest()
        assert tokens + [token for event in events for token in event.get("token_ids", [])] == expected
        assert events[-1]["type"] == "finished", events[-1]
        for name in group.processes:
            assert group.wait_ended(name) == 0, group.account()


@pytest.mark.parametrize("method", [pytest.param(LOOKUP, marks=pytest.mark.soak), MODEL])
def test_an_answer_goes_on_where_drafts_were_in_flight(
    plain: RunningGroup, early_exit: tuple[Path, Path], method: str, tmp_path: Path
) -> None:
    """The first stage stands still with verifying plans on its way when the last one is killed; a group without drafts
    goes on, and `test_speculation` has one with drafts go on.
    """
    expected = plain.generate(PROMPT, LONG)
    with running_group(tmp_path, early_exit[0], 2, **drafting(method, early_exit), **CONFIG) as group:
        with open_stream(group, PROMPT, LONG) as stream:
            tokens = read_tokens(stream, 20)
            with group.standing_still("stage-0"):
                group.kill("stage-1")
                group.wait_ended("stage-1")
            events = stream.rest()
        tokens += [token for event in events for token in event.get("token_ids", [])]
        assert events[-1]["type"] == "failed", events[-1]
        assert_all_name(group, "stage-1")
    assert len(tokens) < len(expected), "it had ended before"
    assert tokens == expected[: len(tokens)]
    request = GenerateRequest(
        request_id="again", prompt=TokenPrompt(token_ids=PROMPT), sampling=LONG, generated_token_ids=tuple(tokens)
    )
    assert tokens + continued(plain, request) == expected


def continued(group: RunningGroup, request: GenerateRequest) -> list[int]:
    with (
        httpx.Client(timeout=120.0) as client,
        client.stream("POST", f"{group.url}/v1/generate", content=request.to_json()) as response,
    ):
        stream = OpenStream(response)
        events = stream.rest()
    assert events[-1]["type"] == "finished", events[-1]
    return [token for event in events for token in event.get("token_ids", [])]
