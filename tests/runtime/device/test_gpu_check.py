"""`make gpu-check`'s own logic: parts end passed, failed or skipped with a reason, and the page says so."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oracles.simulated_accelerator import ImmediateAccelerator
from processes.gloo_ranks import GlooRanks
from processes.repository_files import ROOT
from stageline_api.errors import UserError
from stageline_bench.gpu_check import __main__ as program
from stageline_bench.gpu_check import link_parts, rank_exchanges, shared_card
from stageline_bench.gpu_check.device_parts import DeviceParts
from stageline_bench.gpu_check.group_parts import GroupParts
from stageline_bench.gpu_check.link_parts import LinkParts
from stageline_bench.gpu_check.rank_parts import CUDA, RankParts
from stageline_bench.gpu_check.sections import (
    CheckFailedError,
    Figures,
    Section,
    SkipSectionError,
    Status,
    choose,
    exit_code,
    render,
    run_sections,
    unproven,
)
from stageline_bench.page_section import markers, replace_section
from stageline_runtime.models.layers.attention import PlainAttention
from stageline_runtime.ranks.device_rendezvous import RankMeeting, join_device_ranks
from stageline_runtime.ranks.rank_area import RankArea


def section(name: str, outcome: Figures | Exception) -> Section:
    def run() -> Figures:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return Section(name=name, shows="something", run=run)


PASSES = section("a", {"speed": "3 tok/s", "size": "1 | 2"})
FAILS = section("b", CheckFailedError("7 of 9 differ"))
BREAKS = section("c", RuntimeError("CUDA error:\n  unspecified"))
SKIPS = section("d", SkipSectionError("needs two devices, 1 is there"))


def test_every_part_ends_and_none_stops_the_rest() -> None:
    said: list[str] = []
    outcomes = run_sections([FAILS, BREAKS, SKIPS, PASSES], said.append)
    assert [outcome.status for outcome in outcomes] == [Status.FAILED, Status.FAILED, Status.SKIPPED, Status.PASSED]
    assert outcomes[1].detail == "RuntimeError: CUDA error: unspecified"
    assert outcomes[2].detail == "needs two devices, 1 is there"
    assert any(line.startswith("b: failed: 7 of 9 differ (") for line in said), said


@pytest.mark.parametrize(
    ("parts", "code"), [([PASSES, SKIPS], 0), ([PASSES, FAILS], 1), ([BREAKS], 1)], ids=["fine", "failed", "broken"]
)
def test_a_failure_is_the_exit_status(parts: list[Section], code: int) -> None:
    assert exit_code(run_sections(parts, lambda _line: None)) == code


def test_code_that_was_never_installed_has_a_version_all_the_same() -> None:
    """As where `GPU_PYTHON` runs the tree: without it, engine and stage ended before they had said a word."""
    say = "from stageline_api.version import stageline_version; print(stageline_version())"
    # Without `site` no package is found but by the path.
    done = subprocess.run(
        [sys.executable, "-S", "-c", say],
        env={"PYTHONPATH": str(ROOT / "operator")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("source\n", "")


def test_the_page_gets_the_table_and_keeps_its_prose(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    begin, end = markers("gpu-check")
    page.write_text(f"before\n{begin}old\n{end}\nafter\n")
    replace_section(
        page, "gpu-check", render(run_sections([PASSES, SKIPS], lambda _line: None), "2030-01-01, a device.")
    )
    text = page.read_text()
    assert text.startswith(f"before\n{begin}2030-01-01, a device.\n")
    assert text.endswith(f"{end}\nafter\n")
    assert "| a | something | passed | speed 3 tok/s; size 1 \\| 2 |" in text
    assert "| d | something | skipped | needs two devices, 1 is there |" in text
    assert "old" not in text
    page.write_text("nothing to replace")
    with pytest.raises(UserError, match="has no section"):
        replace_section(page, "gpu-check", "table")


def test_a_part_that_hangs_is_given_up_and_the_others_run() -> None:
    def hang() -> Figures:
        threading.Event().wait()
        return {}

    hanging = Section(name="e", shows="something", run=hang)
    outcomes = run_sections([hanging, PASSES], lambda _line: None, most_seconds=0.1)
    assert [outcome.status for outcome in outcomes] == [Status.FAILED, Status.PASSED]
    assert outcomes[0].detail == "given up after 0.1 s"


def test_a_timer_that_ran_before_a_part_goes_on_behind_it() -> None:
    """Such as pytest-timeout's; where it ran out meanwhile it tells so now."""
    rung: list[int] = []

    def slow() -> Figures:
        time.sleep(0.2)
        return {}

    handler = signal.signal(signal.SIGALRM, lambda number, _frame: rung.append(number))
    before = signal.setitimer(signal.ITIMER_REAL, 500.0)
    try:
        run_sections([PASSES], lambda _line: None)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert (400 < left <= 500, rung) == (True, []), left
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        outcomes = run_sections([Section(name="f", shows="something", run=slow)], lambda _line: None)
        deadline = time.monotonic() + 20
        while not rung and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)
    assert (outcomes[0].status, rung) == (Status.PASSED, [signal.SIGALRM]), outcomes


def test_parts_are_chosen_by_name_in_their_own_order() -> None:
    parts = [PASSES, FAILS, SKIPS]
    assert choose(parts, []) == tuple(parts)
    assert choose(parts, ["d", "a"]) == (PASSES, SKIPS)
    with pytest.raises(UserError, match="--part 'f': no such part; there are a, b, d"):
        choose(parts, ["a", "f"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_a_device_it_says_how_to_get_one_and_ends_well(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "gpu.md"
    assert program.main(["--page", str(page)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("gpu-check: skipped: no CUDA device is visible")
    assert "nvidia.com/gpu: 1" in said
    assert not page.exists()


def test_a_kept_directory_is_absolute_for_groups_that_name_it_in_uris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Path] = []

    def sections(directory: Path) -> tuple[Section, ...]:
        given.append(directory)
        return (PASSES,)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))  # put back behind the test
    monkeypatch.setattr(program, "no_device", lambda: None)
    monkeypatch.setattr(program, "sections", sections)
    assert program.main(["--keep", "kept/here"]) == 0
    assert given == [tmp_path / "kept/here"]
    assert given[0].is_dir(), given


NCCL_THAT_HANGS = """
import threading
from stageline_bench.gpu_check import nccl_start

class Group:
    def __del__(self):
        threading.Event().wait()

def report(group, accelerator):
    if {error}:
        raise {error}
    return {{"version": "1.2"}}

nccl_start.CudaAccelerator = object
nccl_start.new_group = lambda *_: Group()
nccl_start.report = report
nccl_start.main()
"""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("None", (0, '{"version": "1.2"}', "")),
        ("nccl_start.CheckFailedError('nothing is told')", (1, "", "nothing is told\n")),
        ("TypeError('no such type')", (1, "", "TypeError: no such type\n")),
    ],
    ids=["fine", "failed", "unforeseen"],
)
def test_what_nccl_showed_is_printed_though_its_group_never_ends(error: str, expected: tuple[int, str, str]) -> None:
    """The end of a group waits for torch's watchdog, which may be giving up a communicator."""
    command = [sys.executable, "-c", NCCL_THAT_HANGS.format(error=error)]
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_docs_name_every_part_and_call_it_unproven_until_it_ran(tmp_path: Path) -> None:
    text = (ROOT / "docs/dev/gpu-check.md").read_text()
    _, _, table = text.partition(markers("gpu-check")[0])
    for outcome in unproven(program.sections(tmp_path)):
        assert f"| {outcome.name} | {outcome.shows} |" in table, outcome.name
    if "Never run on a GPU." in table:
        assert render(unproven(program.sections(tmp_path)), "Never run on a GPU.") in text


def test_the_parts_that_need_no_gpu_pass_on_a_device_in_disguise(tmp_path: Path) -> None:
    """The same code that the GPU will run, with plain attention and noted operations for graphs."""
    parts = DeviceParts(tmp_path, ImmediateAccelerator(), PlainAttention)
    assert parts.layers() == {"tokens equal to the CPU's": "144 of 144"}
    figures = parts.graphs()
    assert figures.keys() == {"piecewise", "full"}


def test_experts_of_a_device_in_disguise_equal_the_loop(tmp_path: Path) -> None:
    figures = DeviceParts(tmp_path, ImmediateAccelerator(), PlainAttention).experts()
    assert figures.keys() == {"largest error float32", "largest error bfloat16"}


def test_a_device_that_computes_something_else_fails_the_part(tmp_path: Path) -> None:
    class Wrong(PlainAttention):
        def __call__(self, *arguments: object, **named: object) -> torch.Tensor:
            return super().__call__(*arguments, **named).roll(1, dims=1)  # type: ignore[arg-type]

    with pytest.raises(CheckFailedError, match="before the first other one"):
        DeviceParts(tmp_path, ImmediateAccelerator(), Wrong).layers()


@pytest.mark.soak
def test_the_part_on_a_draft_model_passes_on_a_device_in_disguise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join([str(ROOT / "tests/support"), *filter(None, sys.path)]))
    command = (str(ROOT / "tests/support/processes/late_device_stage.py"),)
    figures = GroupParts(tmp_path, device="auto", stage_command=command).drafts()
    assert figures.keys() == {"P = 1", "P = 2"}
    assert all(said.startswith("256 of 256 tokens as without") for said in figures.values()), figures


END_THAT_PRINTS = """
import sys, time
for line in {lines}[int(sys.argv[1])]:
    print(line, flush=True)
sys.stderr.write("the card is on fire")
if {stays}:
    time.sleep(100)
"""
CARRIED = '{"plans": 20, "wrong": 0, "seconds": 1.0}'


def ends_that_print(monkeypatch: pytest.MonkeyPatch, *lines: list[str], stays: bool = False) -> None:
    program = END_THAT_PRINTS.format(lines=lines, stays=stays)
    monkeypatch.setattr(link_parts, "END", [sys.executable, "-c", program])


def test_links_that_carry_something_else_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_that_print(monkeypatch, [CARRIED], [CARRIED])
    assert LinkParts(tmp_path).links() == {"plans": "1000, every byte as sent", "seconds": "1.0"}
    ends_that_print(monkeypatch, [CARRIED], [CARRIED.replace('"wrong": 0', '"wrong": 3')])
    with pytest.raises(CheckFailedError, match=r"by the stage that received them: \{1: 3\}"):
        LinkParts(tmp_path).links()
    ends_that_print(monkeypatch, [CARRIED], [])
    with pytest.raises(CheckFailedError, match=r"an end ended early: .*the card is on fire"):
        LinkParts(tmp_path).links()


def test_a_lost_peer_that_is_never_reported_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    loss = {"error": "plan 20: lost; see the log", "reported_at": now, "past_at": None, "exiting_at": now}
    ends_that_print(monkeypatch, [CARRIED], [CARRIED, json.dumps(loss)])
    found = LinkParts(tmp_path).lost_peers()
    assert found.keys() == {f"{how}, handling {handling}" for how in ("killed", "stopped") for handling in ("0", "2")}
    assert all("(plan 20: lost)" in said and "stays in the receive" in said for said in found.values()), found
    ends_that_print(monkeypatch, [CARRIED], [CARRIED, json.dumps(loss | {"reported_at": None})])
    with pytest.raises(CheckFailedError, match="a lost peer is not reported or the exit hangs"):
        LinkParts(tmp_path).lost_peers()


def test_an_end_that_hangs_at_its_exit_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    loss = {"error": "plan 20: lost", "reported_at": now, "past_at": None, "exiting_at": now}
    ends_that_print(monkeypatch, [CARRIED], [CARRIED, json.dumps(loss)], stays=True)
    monkeypatch.setattr(link_parts, "EXIT_SECONDS", 0.2)
    with pytest.raises(CheckFailedError, match=r"exit takes more than 0\.2 s"):
        LinkParts(tmp_path).lost_peers()


def test_ranks_share_a_card_where_there_are_too_few(tmp_path: Path) -> None:
    shared, own = (RankParts(tmp_path, num_devices=count)._two_devices() for count in (1, 2))
    assert (shared.visible_devices, shared.stage_command) == (("0,0",), shared_card.STAGE_COMMAND)
    assert (own.visible_devices, own.stage_command) == (("0,1",), CUDA.stage_command)


@pytest.mark.soak
def test_the_parts_on_ranks_pass_on_devices_in_disguise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but NCCL: groups of one rank and of two, and one that is killed."""
    monkeypatch.setenv("PYTHONPATH", ":".join([str(ROOT / "tests/support"), *filter(None, sys.path)]))
    command = (str(ROOT / "tests/support/processes/device_ranks_stage.py"),)
    parts = RankParts(tmp_path, replace(CUDA, device="auto", stage_command=command), num_devices=2)
    for part in (parts.tokens, parts.expert_tokens):
        assert part() == {"answers equal to one rank's": "8 of 8"}
    assert parts.lost_rank() == {"named": "stage 0, rank 1"}


def test_exchanges_are_compared_and_timed(tmp_path: Path) -> None:
    """Of a lone rank over gloo: the figures of devices come from their events."""
    area = RankArea(RankArea.create(1, 4096))
    meeting = RankMeeting(str(tmp_path / "meeting"), area, stage=0, rank=0, timeout_seconds=20.0)
    device = ImmediateAccelerator()
    ranks = join_device_ranks(meeting, GlooRanks(), device, timeout_seconds=20.0, step_timeout_seconds=20.0)
    assert rank_exchanges.report(ranks, device, ((1, 8), (3, 16))) == {"[1, 8]": "0.0", "[3, 16]": "0.0"}

    ranks.all_reduce = lambda rows, _operation: rows + 1  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"all-reduce of \[1, 8\] on rank 0"):
        rank_exchanges.report(ranks, device, ((1, 8),))
    ranks.close()
    area.close()


def test_a_captured_mixture_of_a_device_in_disguise_gives_the_eager_tokens(tmp_path: Path) -> None:
    figures = DeviceParts(tmp_path, ImmediateAccelerator(), PlainAttention).captured_mixture()
    assert figures.keys() == {"mixture's tokens equal to the eager ones"}
