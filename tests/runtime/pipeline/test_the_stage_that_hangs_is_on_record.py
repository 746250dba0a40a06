"""Of four stages each one is stopped in turn: by what the others say at their end, the operator records that one.

Real processes end and write their last words; the operator's own rule reads them, as from a kubelet.
"""

import signal
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from oracles.pipeline_checks import greedy, open_stream
from processes.running_group import RunningGroup, running_group
from stageline_api.failures import FailureClass
from stageline_operator.planner.group.cause import SETTLE_SECONDS, Failure, find_cause
from stageline_operator.planner.observed.container_end import ContainerEnd

STAGE_COUNT = 4
STEP_SECONDS = 10.0
END_SECONDS = 60.0
SLOW_STAGE = ("-m", "stageline_bench.runtime.group.paced_stage", "0.1", "0")
"""500 tokens take minutes, so that no answer ends before a stage is stopped."""
LOADS = {"one request": 1, "all slots": 8}
CASES = [(stage, load) for load in LOADS for stage in range(STAGE_COUNT)]


def ends_of(group: RunningGroup, silent: str) -> list[ContainerEnd]:
    """As kubelets tell them, in whole seconds; the one that is stopped tells nothing."""
    began = datetime.now(UTC).replace(microsecond=0)
    found = []
    for name in group.processes.keys() - {silent}:
        code = group.wait_ended(name, STEP_SECONDS + END_SECONDS)
        message = (group.directory / f"{name}.termination").read_text(encoding="utf-8")
        is_engine = name == "engine"
        stage, container = (0, "engine") if is_engine else (int(name.removeprefix("stage-")), "stage")
        found.append(ContainerEnd(stage, container, code, 0, "Error", message, began))
    return found


@pytest.mark.parametrize(("stage", "load"), CASES)
def test_a_stopped_stage_is_the_one_on_record(stage: int, load: str, tiny_llama: Path, tmp_path: Path) -> None:
    limits = {"step_seconds": STEP_SECONDS}
    with ExitStack() as stack:
        group = stack.enter_context(
            running_group(tmp_path, tiny_llama, STAGE_COUNT, stage_command=SLOW_STAGE, timeouts=limits, max_num_seqs=8)
        )
        prompts = [(5, 6, 7 + number) for number in range(LOADS[load])]
        streams = [stack.enter_context(open_stream(group, prompt, greedy(500))) for prompt in prompts]
        for stream in streams:
            while stream.next_event()["type"] != "delta":
                pass
        group.processes[f"stage-{stage}"].send_signal(signal.SIGSTOP)
        ends = ends_of(group, f"stage-{stage}")
        later = ends[0].finished_at + timedelta(seconds=SETTLE_SECONDS)
        for order in (ends, ends[::-1]):  # kubelets tell in any order
            cause = find_cause(order, later)
            assert isinstance(cause, Failure), (cause, group.account())
            assert (cause.end.stage, cause.failure_class) == (stage, FailureClass.STEP_TIMEOUT), (
                cause,
                group.account(),
            )
