"""A stage that others on its machine leave no CPU is slow, not hung: neither it nor who waits for it ends the group."""

from pathlib import Path

from oracles.pipeline_checks import greedy
from processes.running_group import running_group

STAGE = Path(__file__).parents[2] / "support" / "processes" / "starved_stage.py"
STEP_SECONDS = 2.0
STARVED_SECONDS = 5.0
"""More than the engine waits for a step that nobody computes."""


def test_a_step_that_takes_long_for_want_of_cpu_ends(tmp_path: Path, tiny_llama: Path) -> None:
    command = (str(STAGE), str(STARVED_SECONDS), "0")
    timeouts = {"step_seconds": STEP_SECONDS}
    with running_group(tmp_path, tiny_llama, 2, stage_command=command, timeouts=timeouts, max_num_seqs=2) as group:
        assert len(group.generate((5, 6, 7), greedy(1))) == 1, group.account()
