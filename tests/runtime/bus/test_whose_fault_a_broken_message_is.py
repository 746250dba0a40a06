"""A stage that breaks the plan bus's protocol is named with the field; a bug in the engine is blamed on no stage."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from oracles.pipeline_checks import greedy, open_stream
from oracles.tiny_models import write_tiny_llama
from processes import broken_engine
from processes.played_stage import PlayedStage, hello, played_stage
from processes.running_group import running_group
from stageline_runtime.plan_bus.messages import (
    Computing,
    Drafted,
    Loaded,
    Measured,
    SampledRow,
    StepDone,
    StepPlan,
    ToEngine,
    ToStage,
    Welcome,
)


def wait_for(stage: PlayedStage, kind: type[ToStage]) -> None:
    while not isinstance(stage.hear(), kind):
        pass


def last_words_after(directory: Path, stages: int, sender: int, fault: ToEngine) -> dict[str, Any]:
    """What an engine says at its end, to whom all stages are played; one of them answers the warm-up with `fault`."""
    held_back = frozenset(f"stage-{stage}" for stage in range(stages))
    model_dir = write_tiny_llama(directory / "model")
    with (
        running_group(directory / "group", model_dir, stages, start=False, held_back=held_back) as group,
        ExitStack() as stack,
    ):
        group.wait_until(lambda: group.engine_status().get("phase") == "Connecting", "the engine listens")
        hellos = [hello(stage=stage, stage_count=stages) for stage in range(stages)]
        played = [stack.enter_context(played_stage(group, said)) for said in hellos]
        for stage, each in enumerate(played):
            wait_for(each, Welcome)
            each.say(Loaded(stage, 1))
        for each in played:
            wait_for(each, StepPlan)
        played[sender].say(fault)
        assert group.wait_ended("engine") == 71, group.account()
        assert "Traceback" not in group.log("engine"), group.log("engine")
        return group.last_words("engine")


FAULTS: list[tuple[int, int, ToEngine, str]] = [
    (1, 0, StepDone(99, ()), "StepDone.seq is 99, but 0 is the next plan to finish"),
    (1, 0, StepDone(-1, ()), "Expected `int` >= 0 - at `$[1]`"),
    (1, 0, StepDone(0, (SampledRow(0, 1, 5, num_sampled=-2),)), "Expected `int` >= 0"),
    (1, 0, Computing(-1), "Expected `int` >= 0 - at `$[1]`"),
    (1, 0, Drafted(0, (), 0.1), "Drafted of plan 0, but no plan asks for drafts"),
    (1, 0, Loaded(1, 1), "Loaded.stage is 1"),
    (1, 0, Measured(7, 1, 1), "Measured.stage is 7"),
    (2, 0, StepDone(0, ()), "StepDone is the last stage's to send"),
]


@pytest.mark.parametrize(("stages", "sender", "fault", "words"), FAULTS)
def test_a_stage_that_breaks_the_protocol_is_named_with_the_field(
    stages: int, sender: int, fault: ToEngine, words: str, tmp_path: Path
) -> None:
    said = last_words_after(tmp_path, stages, sender, fault)
    assert (said["failure_class"], said["peer"]) == ("PeerLost", sender), said
    assert said["detail"].startswith(f"stage {sender} broke the plan bus's protocol: "), said
    assert words in said["detail"], said


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("complete", "a bug in the engine: KeyError: 'slot 3'"),
        ("schedule", "a bug in the engine: KeyError: 'slot 4'"),
        ("nothing", "a bug in the engine: the scheduler made no plan for 1 requests within 2 s"),
    ],
)
def test_a_bug_in_the_engine_is_blamed_on_no_stage(bug: str, words: str, tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "model")
    command = (broken_engine.PATH, bug)
    timeouts = {"step_seconds": 2.0}
    with running_group(tmp_path / "group", model_dir, 2, engine_command=command, timeouts=timeouts) as group:
        with open_stream(group, (5, 6, 7), greedy(4)):
            assert group.wait_ended("engine") == 1, group.account()
        said = group.last_words("engine")
        assert group.wait_ended("stage-1") != 0, group.account()
        of_stage = group.last_words("stage-1")
    assert said["failure_class"] == "Internal", said
    assert said["detail"] == words, said
    assert said.get("peer") is None, said
    assert of_stage["failure_class"] == "EngineLost", of_stage
