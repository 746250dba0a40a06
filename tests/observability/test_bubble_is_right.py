"""Stages slowed by known amounts: their real /metrics, read twice, show what theory gives.

The pipeline's theory: of P stages that take t_s for a plan, one request alone keeps one plan under way, so a plan takes
sum(t). Requests in P cohorts keep P under way, the slowest stage never waits, and a plan takes max(t). A stage is busy
for t_s of that, and the rest is its bubble.

Nothing here is about speed: stages sleep, and theory is computed from how long they really slept, as they timed it
beside their own clock, so that a sleep that a loaded machine ends late is no error. What stays is that such a machine
delays what lies between steps too. That is not what is tested, so of some rounds one undisturbed one is enough.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

import httpx
import pytest

from oracles.pipeline_checks import greedy
from oracles.tiny_models import write_tiny_tokenizer
from processes.running_group import RunningGroup, running_group
from stageline_api import ports
from stageline_bench.runtime.paced import write_paced_model
from stageline_bench.runtime.record.stage_clock import (
    PipelineFigures,
    StageSeconds,
    parse_stage_seconds,
    pipeline_figures,
)

PACES: Final = (0.1, 0.25, 0.175)
POINTS: Final = 0.03
ROUNDS: Final = 5
STAGE: Final = Path(__file__).parents[1] / "support" / "processes" / "uneven_stage.py"


@dataclass(frozen=True)
class Theory:
    """Figures when one plan takes `seconds_of_stage` and the next one ends `seconds` later."""

    seconds_of_stage: Sequence[float]
    seconds: float

    def bubble_of_stage(self, stage: int) -> float:
        return 1 - self.seconds_of_stage[stage] / self.seconds

    @property
    def bubble(self) -> float:
        return 1 - sum(self.seconds_of_stage) / (len(self.seconds_of_stage) * self.seconds)

    @property
    def bottleneck_share(self) -> float:
        return max(self.seconds_of_stage) / self.seconds

    @property
    def imbalance(self) -> float:
        return max(self.seconds_of_stage) * len(self.seconds_of_stage) / sum(self.seconds_of_stage)


@dataclass(frozen=True)
class Reading:
    """One stage's counters, the moments between which they were read, and how long its plans have slept so far."""

    clock: StageSeconds
    sent: float
    received: float
    slept: tuple[float, ...]


@dataclass(frozen=True)
class Window:
    """What two readings of all stages say about the time between them."""

    early: Sequence[Reading]
    late: Sequence[Reading]

    @property
    def stages(self) -> list[StageSeconds]:
        return [late.clock.since(early.clock) for late, early in zip(self.late, self.early, strict=True)]

    @property
    def has_plans(self) -> bool:
        """Whether each stage has slept for one."""
        return all(len(late.slept) > len(early.slept) for late, early in zip(self.late, self.early, strict=True))

    @property
    def paces(self) -> list[float]:
        """Seconds that a plan really slept on each stage."""
        return [mean(late.slept[len(early.slept) :]) for late, early in zip(self.late, self.early, strict=True)]

    @property
    def figures(self) -> PipelineFigures:
        return pipeline_figures(self.stages)

    def check_clocks(self) -> None:
        """The states tile the stages' time, and that is the time outside, as exactly as it can be told from there."""
        assert self.figures.clock_error < 1e-6, "busy + wait + idle is not wall"
        for stage, early, late in zip(self.stages, self.early, self.late, strict=True):
            assert late.sent - early.received <= stage.wall <= late.received - early.sent


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGroup]:
    directory = tmp_path_factory.mktemp("uneven")
    model = write_paced_model(directory / "model", len(PACES))
    write_tiny_tokenizer(model)
    command = (str(STAGE), str(directory / "slept-"), *map(str, PACES))
    settings: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 128}
    with running_group(directory / "group", model, len(PACES), stage_command=command, **settings) as running:
        yield running


def readings(group: RunningGroup) -> list[Reading]:
    found = []
    with httpx.Client(timeout=60, trust_env=False, verify=False) as http:
        for stage, address in enumerate(group.addresses):
            sent = time.perf_counter()
            page = http.get(f"http://{address}:{ports.STAGE_HEALTH}/metrics").text
            received = time.perf_counter()
            lines = (group.directory.parent / f"slept-{stage}").read_text(encoding="utf-8").splitlines(keepends=True)
            slept = tuple(float(line) for line in lines if line.endswith("\n"))
            found.append(Reading(parse_stage_seconds(page), sent, received, slept))
    return found


def tokens_made(group: RunningGroup) -> int:
    return int(group.engine_status()["generation_tokens_total"])


def wait_idle(group: RunningGroup) -> None:
    group.wait_until(lambda: group.engine_status()["requests_running"] == 0, "an idle group")


def one_request(group: RunningGroup) -> tuple[Window, Theory]:
    """From before it comes until after it has ended; idle seconds at both ends belong to no figure."""
    wait_idle(group)
    early = readings(group)
    group.generate((3, 5, 7), greedy(6))
    # Stages count their last step and hear that nothing is left to do after the answer has ended.
    group.wait_until(lambda: idle_again(early, readings(group)), "0.3 idle seconds of each stage, to leave out")
    window = Window(early, readings(group))
    assert [stage.steps for stage in window.stages] == [6, 6, 6]
    return window, Theory(window.paces, sum(window.paces))


def idle_again(early: Sequence[Reading], late: Sequence[Reading]) -> bool:
    return all(stage.steps >= 6 and stage.idle >= 0.3 for stage in Window(early, late).stages)


def full_pipeline(group: RunningGroup) -> tuple[Window, Theory] | None:
    """One request in each cohort. Both readings follow the end of a plan, so that whole turns lie between them.

    None when the first reading came so late that there was no plan between the two.
    """
    requests, tokens, measured_plans = len(PACES), 13, 21
    wait_idle(group)
    steady = tokens_made(group) + 3 * requests
    with ThreadPoolExecutor(1) as pool:
        prompts: list[tuple[int, ...]] = [(3 + index, 5, 7) for index in range(requests)]
        answers = pool.submit(group.generate_all, prompts, [greedy(tokens)] * requests)
        group.wait_until(lambda: tokens_made(group) >= steady, "steady decode")
        early = readings(group)
        group.wait_until(lambda: tokens_made(group) >= steady + measured_plans, "seven turns of each")
        window = Window(early, readings(group))
        assert [len(answer) for answer in answers.result()] == [tokens] * requests
    return (window, Theory(window.paces, max(window.paces))) if window.has_plans else None


def errors(window: Window, theory: Theory) -> dict[str, float]:
    """By figure, how far the counters are from theory."""
    figures = window.figures
    found = {
        "bubble": figures.bubble_ratio - theory.bubble,
        "bottleneck share": figures.bottleneck_share - theory.bottleneck_share,
        "imbalance": figures.imbalance - theory.imbalance,
    }
    for index, stage in enumerate(window.stages):
        found[f"bubble of stage {index}"] = stage.wait_seconds / stage.active_seconds - theory.bubble_of_stage(index)
    return found


@pytest.mark.parametrize("measure", [one_request, full_pipeline])
def test_ratio_share_and_imbalance_are_those_of_theory(
    group: RunningGroup, measure: Callable[[RunningGroup], tuple[Window, Theory] | None]
) -> None:
    seen = []
    for _ in range(ROUNDS):
        if (measured := measure(group)) is None:
            seen.append("no plan was measured")
            continue
        window, theory = measured
        window.check_clocks()
        assert all(slept >= told for slept, told in zip(theory.seconds_of_stage, PACES, strict=True)), theory
        found = errors(window, theory)
        if all(abs(error) <= POINTS for error in found.values()):
            break
        seen.append(f"{found} with {theory}")
    else:
        raise AssertionError(f"no round of {ROUNDS} within {POINTS}:\n" + "\n".join(seen))
