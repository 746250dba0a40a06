"""A real engine counts before anything is loaded, and decides by what its loaded stages measured."""

from pathlib import Path

import pytest

from oracles.tiny_models import write_tiny_llama
from processes.played_stage import hello, played_stage
from processes.running_group import RunningGroup, running_group
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.plan_bus.messages import CacheSized, GroupFailed, Measured, ToStage, Welcome
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS
from stageline_runtime.planning.memory import MEBIBYTE, USABLE_DEVICE_SHARE

AVAILABLE_BYTES = 64 * MEBIBYTE
USABLE_BYTES = int(AVAILABLE_BYTES * USABLE_DEVICE_SHARE)
FLOAT32_BYTES = 4


def answer_to(directory: Path, measured: tuple[Measured, Measured]) -> tuple[RunningGroup, list[ToStage], int]:
    """What an engine of two stages, each with a device of 64 MiB, says to both measurements; and bytes of a block."""
    model_dir = write_tiny_llama(directory / "model")
    config = read_model_config(model_dir)
    held_back = frozenset({"stage-0", "stage-1"})
    with running_group(directory / "group", model_dir, 2, start=False, held_back=held_back) as group:
        group.wait_until(lambda: group.engine_status().get("phase") == "Connecting", "the engine listens")
        said = [hello(stage=stage, device=f"gpu-{stage}", available_bytes=AVAILABLE_BYTES) for stage in (0, 1)]
        with played_stage(group, said[0]) as first, played_stage(group, said[1]) as last:
            welcome = first.hear()
            assert isinstance(welcome, Welcome)
            assert isinstance(last.hear(), Welcome)
            first.say(measured[0])
            last.say(measured[1])
            answers = [first.hear(), last.hear()]
            layers = welcome.last_layer - welcome.first_layer + 1
            if isinstance(answers[0], GroupFailed):
                group.wait_ended("engine")
            return group, answers, BLOCK_TOKENS * config.kv_bytes_per_token(layers, FLOAT32_BYTES)


@pytest.mark.parametrize("short", [0, 1])
def test_the_stage_with_least_left_decides(tmp_path: Path, short: int) -> None:
    """One has nothing but its cache, the other has 40 blocks and a bit beside what it measured."""
    block = answer_to(tmp_path / "probe", (Measured(0, 0, 0), Measured(1, 0, 0)))[2]
    left = 40 * block + block // 2
    measured = [Measured(0, 0, 0), Measured(1, 0, 0)]
    measured[short] = Measured(short, USABLE_BYTES - left - 1000, 1000)
    _, answers, _ = answer_to(tmp_path / "sized", (measured[0], measured[1]))
    assert answers == [CacheSized(40)] * 2


def test_what_was_counted_to_fit_and_measured_not_to_is_named(tmp_path: Path) -> None:
    held, step = USABLE_BYTES - 2 * MEBIBYTE, 5 * MEBIBYTE
    group, answers, _ = answer_to(tmp_path, (Measured(0, 0, 0), Measured(1, held, step)))
    assert all(isinstance(answer, GroupFailed) for answer in answers), answers
    words = group.last_words("engine")
    assert words["failure_class"] == "OutOfMemory", words
    assert words["operation"] == "size the cache", words
    assert "stage 1: 4 MiB of memory are missing: weights take 61 MiB, the largest step 5 MiB" in words["detail"], words
