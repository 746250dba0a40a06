"""Sampling with a seed, and bfloat16: what stays the same when the number of stages changes, and what need not."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oracles.pipeline_checks import draw_prompts, greedy
from oracles.tiny_models import VOCAB_SIZE
from processes.running_group import running_group
from stageline_api.engine_http import SamplingParams


@pytest.mark.thorough
def test_seeded_sampling_is_the_same_at_any_stage_count_and_after_a_restart(tiny_llama: Path, tmp_path: Path) -> None:
    """In float32: the noise is keyed by seed and position alone."""
    prompts = draw_prompts(10, VOCAB_SIZE, 40)
    samplings = [
        SamplingParams(temperature=0.8, top_p=0.9, top_k=(0, 20)[index % 2], seed=index, max_tokens=24, ignore_eos=True)
        for index in range(len(prompts))
    ]
    outputs = []
    for run, stage_count in enumerate((1, 2, 3, 2)):
        with running_group(tmp_path / str(run), tiny_llama, stage_count, dtype="float32", max_num_seqs=6) as group:
            outputs.append(group.generate_all(prompts, samplings))
    assert outputs[1:] == outputs[:1] * 3
    assert len({tuple(tokens) for tokens in outputs[0]}) == len(prompts)


@contextmanager
def one_core() -> Iterator[None]:
    """A lone stage takes all cores, and how many threads share a product decides how it is rounded on some processors.

    With one core each stage has one thread, however many there are.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture(scope="module")
def bfloat16_outputs(
    smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[list[list[int]], list[list[int]]]]:
    """By stage count: tokens of six requests one at a time, and of the same six at once."""
    prompts = draw_prompts(6, 49_000, 24)
    outputs = {}
    for stage_count in (1, 2, 3):
        directory = tmp_path_factory.mktemp(f"bfloat16-{stage_count}")
        with (
            one_core(),
            running_group(
                directory, smollm2_dir, stage_count, is_fresh=True, dtype="bfloat16", max_model_len=128
            ) as group,
        ):
            alone = [group.generate(prompt, greedy(12)) for prompt in prompts]
            together = group.generate_all(prompts, [greedy(12)] * len(prompts))
        outputs[stage_count] = (alone, together)
    return outputs


@pytest.mark.thorough
def test_bfloat16_tokens_are_the_same_when_shapes_are(
    bfloat16_outputs: dict[int, tuple[list[list[int]], list[list[int]]]],
) -> None:
    """One request at a time gives every stage count plans of the same padded shapes."""
    alone = {stage_count: outputs[0] for stage_count, outputs in bfloat16_outputs.items()}
    assert alone[2] == alone[1]
    assert alone[3] == alone[1]


@pytest.mark.thorough
def test_bfloat16_divergence_between_shapes_is_reported(
    bfloat16_outputs: dict[int, tuple[list[list[int]], list[list[int]]]],
    record_property: Callable[[str, object], None],
) -> None:
    """Other batch shapes round differently, so streams may part; how many did is told, not judged."""
    for stage_count, (alone, together) in bfloat16_outputs.items():
        assert all(len(tokens) == 12 for tokens in together), together
        parted = sum(one != other for one, other in zip(alone, together, strict=True))
        record_property(f"bfloat16_streams_parted_at_{stage_count}_stages", f"{parted} of {len(alone)}")
        print(f"bfloat16, {stage_count} stages: {parted} of {len(alone)} streams differ batched from alone")  # noqa: T201
