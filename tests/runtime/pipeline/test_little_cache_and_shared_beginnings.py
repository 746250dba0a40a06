"""A group short of KV cache that reuses beginnings says token for token what a roomy one without reuse says."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oracles.pipeline_checks import Prompt, open_stream, samples, stage_samples
from oracles.tiny_models import VOCAB_SIZE
from processes.running_group import RunningGroup, page, running_group
from processes.small_machines import short_stage_command
from stageline_api.engine_http import SamplingParams
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS

MAX_MODEL_LEN = 128
NUM_BLOCKS = 16
"""Room for two whole sequences, and eight slots."""
OUTPUT_TOKENS = (40, 57)
"""From as few to as many: so many that the room runs out in whatever order the requests come."""


@pytest.fixture(scope="module")
def short_group(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGroup]:
    with running_group(
        tmp_path_factory.mktemp("short"),
        tiny_llama,
        2,
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=40,
        max_model_len=MAX_MODEL_LEN,
        stage_command=short_stage_command(NUM_BLOCKS),
    ) as group:
        yield group


def draw(count: int) -> tuple[list[Prompt], list[SamplingParams]]:
    """Prompts of which many begin alike, greedy and not."""
    chooser = random.Random(5)

    def tokens(length: int) -> Prompt:
        return tuple(chooser.randrange(3, VOCAB_SIZE) for _ in range(length))

    stems = [tokens(40), tokens(33)]
    prompts = [chooser.choice([*stems, ()]) + tokens(chooser.randint(1, 30)) for _ in range(count)]
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"temperature": 1.1, "frequency_penalty": 0.6, "top_p": 0.9},
    ]
    samplings = [
        SamplingParams(seed=index, max_tokens=chooser.randint(*OUTPUT_TOKENS), ignore_eos=True, **options[index % 3])
        for index in range(count)
    ]
    return prompts, samplings


@pytest.mark.thorough
def test_nobody_gets_other_tokens_for_want_of_cache(
    short_group: RunningGroup, tiny_llama: Path, tmp_path: Path
) -> None:
    prompts, samplings = draw(16)
    with running_group(tmp_path, tiny_llama, 2, dtype="float32", max_num_seqs=16, prefix_cache=False) as roomy:
        expected = roomy.generate_all(prompts, samplings)
        figures = samples(f"{roomy.url}/metrics")
        assert figures["stageline_prefix_cache_hits_total"] == {(): 0.0}
        assert figures["stageline_preemptions_total"] == {(): 0.0}
    for _ in range(2):
        assert short_group.generate_at_once(prompts, samplings) == expected
    figures = samples(f"{short_group.url}/metrics")
    assert figures["stageline_preemptions_total"][()] > 0, "cache never ran out"
    hits, queries = (figures[f"stageline_prefix_cache_{what}_total"][()] for what in ("hits", "queries"))
    assert queries == 2 * sum(map(len, prompts))
    assert 32 * 10 < hits < queries
    for stage in range(2):
        capacity = stage_samples(short_group, stage)["stageline_stage_kv_capacity_tokens"]
        assert list(capacity.values()) == [NUM_BLOCKS * BLOCK_TOKENS]
        held = stage_samples(short_group, stage)["stageline_stage_kv_tokens"]
        assert sum(held.values()) <= NUM_BLOCKS * BLOCK_TOKENS


def test_usage_says_what_came_from_the_cache(short_group: RunningGroup) -> None:
    prompt = tuple(random.Random(9).randrange(3, VOCAB_SIZE) for _ in range(50))
    found = []
    for _ in range(2):
        with open_stream(short_group, prompt, SamplingParams(max_tokens=3, ignore_eos=True)) as stream:
            found.append(stream.rest()[-1].get("cached_tokens", 0))
    assert found == [0, 48]


def test_a_beginning_is_shared_under_one_salt_alone(short_group: RunningGroup) -> None:
    prompt = tuple(random.Random(10).randrange(3, VOCAB_SIZE) for _ in range(50))
    told = []
    for salt in (None, "ours", "ours", "theirs", None):
        with open_stream(short_group, prompt, SamplingParams(max_tokens=3, ignore_eos=True), cache_salt=salt) as stream:
            events = stream.rest()
        told.append(
            ([i for event in events[:-1] for i in event.get("token_ids", ())], events[-1].get("cached_tokens", 0))
        )
    assert [cached for _, cached in told] == [0, 0, 48, 0, 48]
    assert all(ids == told[0][0] for ids, _ in told), "and the answers are the same"


def test_beginnings_are_told_by_the_names_that_requests_gave_them(short_group: RunningGroup) -> None:
    assert short_group.engine_status()["slots"] == 8
    prompt = tuple(random.Random(11).randrange(3, VOCAB_SIZE) for _ in range(50))
    prefixes = [("0a0a0a0a0a0a", 0.1), ("0b0b0b0b0b0b", 0.5), ("0c0c0c0c0c0c", 1.0)]
    with open_stream(short_group, prompt, SamplingParams(max_tokens=3, ignore_eos=True), prefixes=prefixes) as stream:
        stream.rest()
    held = set(page(f"{short_group.url}/v1/prefixes").json()["keys"])
    assert held & {name for name, _ in prefixes} == {"0b0b0b0b0b0b", "0c0c0c0c0c0c"}, "five tokens are no block"


def test_clients_that_leave_and_come_back_find_their_tokens(short_group: RunningGroup) -> None:
    """Aborts at all ages while others run; nothing of what is left behind reaches anyone."""
    prompts, samplings = draw(12)
    expected = [short_group.generate(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]

    def leave(index: int) -> None:
        with open_stream(short_group, prompts[index], samplings[index]) as stream:
            for _ in range(1 + index % 7):
                stream.next_event()

    with ThreadPoolExecutor(max_workers=12) as pool:
        leaving = [pool.submit(leave, index) for index in range(12)]
        answers = [pool.submit(short_group.generate, prompts[index], samplings[index]) for index in range(12)]
        assert [answer.result() for answer in answers] == expected
        for one in leaving:
            one.result()
    short_group.wait_until(lambda: short_group.engine_status()["requests_running"] == 0, "the end of all requests")
    usage = samples(f"{short_group.url}/metrics")["stageline_kv_cache_usage_ratio"]
    assert list(usage.values()) == [0.0], json.dumps(short_group.engine_status())
