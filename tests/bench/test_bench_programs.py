"""The benchmark programs on tiny models: they measure real groups, write well-formed results, leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from oracles.tiny_models import write_tiny_llama
from processes.command_here import stageline_here
from stageline_bench.runtime.command import bench
from stageline_bench.runtime.record.results import Result

pytestmark = pytest.mark.timeout(900)
BENCH = (sys.executable, "-m", "stageline_bench.runtime")
CORES = sorted(os.sched_getaffinity(0))
DEADLINE_SECONDS = 150.0
PAGE = "# Figures\n\nProse.\n\n<!-- begin {0} -->\nold\n<!-- end {0} -->\n\nMore prose.\n"


def two_cores() -> str:
    """Two cores, or the one there is twice: nothing here depends on speed."""
    return f"{CORES[0]},{CORES[1 % len(CORES)]}"


def run_bench(tmp_path: Path, program: str, *options: str) -> Result:
    """Run a program to its end; the result it wrote."""
    results = tmp_path / "results"
    done = subprocess.run(
        [*BENCH, program, "--results", str(results), *options], capture_output=True, text=True, check=False, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = results.glob(f"*-{program}.json")
    return Result.model_validate_json(path.read_text())


def processes_of(session_leader: int) -> list[str]:
    """Command lines of live processes whose parent is `session_leader`."""
    listed = subprocess.run(
        ["ps", "-o", "args=", "--ppid", str(session_leader)], capture_output=True, text=True, check=False
    )
    return listed.stdout.splitlines()


def wait_ended(pids: list[int]) -> None:
    """Until none of the processes runs."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while running := [pid for pid in pids if _alive(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def test_offline_reports_every_stage_and_its_states_tile_the_time(tmp_path: Path, tiny_model: Path) -> None:
    result = run_bench(
        tmp_path,
        "offline",
        *("--source", f"file://{tiny_model}", "--dtype", "float32", "--stage-cores", two_cores(), "--rounds", "2"),
        *("--requests", "4", "--input-tokens", "8", "--output-tokens", "24", "--max-model-len", "64"),
    )
    assert len(result.rounds) == 2
    for one in result.rounds:
        assert one["tokens_per_second"] > 0
        assert len(one["whole"]["stages"]) == 2
        assert one["whole"]["clock_error"] < 0.01
        assert 0 <= one["whole"]["bubble_ratio"] <= 1
        # Two cohorts of 24 tokens each; a stage counts its last step after the engine has heard of it.
        assert all(stage["steps"] >= 2 * 24 - 1 for stage in one["whole"]["stages"]), one["whole"]["stages"]
    text = next((tmp_path / "results").glob("*.json")).read_text()
    assert json.loads(text)["program"] == "offline"
    assert len(text) < 10_000, "numbers are rounded to what was measured"
    assert result.machine.cores == len(CORES)


@pytest.mark.soak
def test_paced_stages_measure_a_bubble_and_fill_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.format("paced"))
    # Long enough that a busy machine reads the clocks twice before the first stream ends.
    tokens, seconds_per_step = 96, 0.03
    result = run_bench(
        tmp_path,
        "paced",
        *("--stage-cores", two_cores(), "--requests", "4", "--output-tokens", str(tokens), "--rounds", "1"),
        *("--seconds-per-step", str(seconds_per_step), "--page", str(page)),
    )
    (one,) = result.rounds
    assert one["steady"] is not None
    for stage in one["whole"]["stages"]:
        assert sum(stage["busy"].values()) >= 2 * tokens * seconds_per_step, "every step takes its pace"
    text = page.read_text()
    assert "steady decode" in text
    assert "old" not in text
    assert text.startswith("# Figures\n\nProse.")
    assert text.endswith("More prose.\n")


@pytest.mark.soak
def test_pipeline_pairs_the_three_measurements(tmp_path: Path, tiny_model: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.format("pipeline"))
    result = run_bench(
        tmp_path,
        "pipeline",
        *("--source", f"file://{tiny_model}", "--dtype", "float32", "--cores", two_cores(), "--page", str(page)),
        *("--requests-per-core", "2", "--starts", "1", "--rounds", "2"),
    )
    assert len(result.rounds) == 2
    for one in result.rounds:
        assert one["ceiling_tokens_per_second"] > 0
        assert len(one["ceiling"]) == 2
        assert len(one["pipeline"]["whole"]["stages"]) == 2
        assert len(one["alone"]["whole"]["stages"]) == 1
    # So few tokens of so small a model may be over before a busy machine has read the clocks twice.
    unsteady = [part for part in ("pipeline", "alone") if not any(one[part]["steady"] for one in result.rounds)]
    unmeasured = [target.name for target in result.targets if target.met is None]
    assert len(unmeasured) == len(unsteady), (unmeasured, unsteady)
    assert "| P = 2 |" in page.read_text()


@pytest.mark.soak
def test_an_interrupt_ends_every_process(tmp_path: Path) -> None:
    bench = subprocess.Popen(
        [*BENCH, "paced", "--rounds", "1000", "--results", str(tmp_path), "--stage-cores", two_cores()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert bench.stdout is not None
    try:
        first_line = bench.stdout.readline()
        assert first_line.startswith("paced 1/1000"), first_line
        children = _descendants(bench.pid)
        assert len(children) == 6, processes_of(bench.pid)
        bench.send_signal(signal.SIGINT)
        assert bench.wait(timeout=150) == 130
        assert "Traceback" not in bench.stdout.read()
        wait_ended(children)
    finally:
        bench.kill()
        bench.wait()
        bench.stdout.close()


@pytest.mark.soak
def test_a_killed_benchmark_leaves_no_process(tmp_path: Path) -> None:
    bench = subprocess.Popen(
        [*BENCH, "paced", "--rounds", "1000", "--results", str(tmp_path), "--stage-cores", two_cores()],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert bench.stdout is not None
    try:
        bench.stdout.readline()
        children = _descendants(bench.pid)
        assert len(children) == 6, processes_of(bench.pid)
    finally:
        bench.kill()
        bench.wait()
        bench.stdout.close()
    wait_ended(children)


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = stageline_here("bench", "offline", "--source", f"file://{tmp_path}/none", "--results", str(tmp_path))
    assert done.returncode != 0
    assert "none" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("offline", "--stage-cores", "0,9999"), "no core 9999"),
        (("offline", "--stage-cores", ","), "at least one core"),
        (("offline", "--engine-cores", "9999"), "no core 9999"),
        (("offline", "--input-tokens", "600"), "600 + 96 tokens don't fit a context of 640"),
        (("paced", "--output-tokens", "609"), "32 + 609 tokens don't fit a context of 640"),
        (("pipeline", "--cores", str(CORES[0])), "give two cores"),
        (("speculation", "--stages", "1,2", "--cores", str(CORES[0])), "'1,2' are not pipelines over the cores"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(options: tuple[str, ...], complaint: str) -> None:
    refused = CliRunner().invoke(bench, options)
    assert refused.exit_code == 2, refused.output
    assert complaint in " ".join(refused.output.split()), refused.output


def _descendants(pid: int) -> list[int]:
    """Two stages and an engine, each below the leader of its session."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [one for child in children for one in (child, *_descendants(child))]


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.soak
def test_paced_drafts_are_measured_beside_none(tmp_path: Path) -> None:
    result = run_bench(
        tmp_path,
        "paced-speculation",
        *("--stages", "3,4", "--cores", two_cores(), "--output-tokens", "48", "--rounds", "1"),
        *("--seconds-per-step", "0.01", "--seconds-per-token", "0.001,0.002"),
    )
    assert [(one["case"], sorted(one["tokens_per_second"])) for one in result.rounds] == [
        (f"paced, P = {stages}, {cost} ms a token, with drafts", ["drafts", "plain"])
        for stages in (3, 4)
        for cost in (1, 2)
    ]
    assert len(result.targets) == 1, "only four stages have a floor, where tokens are cheap"
    for one in result.rounds:
        assert all(rate > 0 for rate in one["tokens_per_second"].values())
        assert one["equal_answers"] == one["answers"] == 1
    assert all(target.measured is not None for target in result.targets)
