"""A benchmark's result: a small JSON file with every round's figures, and whether each target was met."""

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict

from stageline_bench.page_section import cpu_name
from stageline_bench.runtime.record.figures import RoundReport
from stageline_bench.runtime.record.stage_clock import StageSeconds, pipeline_figures


class Target(BaseModel):
    """A target figure of the project."""

    model_config = ConfigDict(frozen=True)

    name: str
    measured: float | None
    """None if this run could not measure it."""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether it is met; None if it wasn't measured."""
        if self.measured is None:
            return None
        low = self.at_least is None or self.measured >= self.at_least
        return low and (self.at_most is None or self.measured <= self.at_most)


class Machine(BaseModel):
    """The machine, and its load."""

    model_config = ConfigDict(frozen=True)

    cpu: str
    cores: int
    torch: str
    python: str
    load_average: float
    """Of the minute before the first round: far above 0 means that other processes used the machine."""


class Result(BaseModel):
    """One run of one program."""

    model_config = ConfigDict(frozen=True)

    program: str
    date: str
    machine: Machine
    parameters: dict[str, Any]
    rounds: list[dict[str, Any]]
    """Figures of every round, in the order of measurement."""
    targets: list[Target]


def this_machine() -> Machine:
    """The current machine."""
    return Machine(
        cpu=cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        torch=importlib.metadata.version("torch"),
        python=platform.python_version(),
        load_average=round(os.getloadavg()[0], 2),
    )


def today() -> str:
    """The date, in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def write_result(result: Result, directory: Path) -> Path:
    """Write `<date>-<program>.json`; a later run of the same day replaces it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result.date}-{result.program}.json"
    path.write_text(_render(result), encoding="utf-8")
    return path


def _render(result: Result) -> str:
    """JSON with one line for each round, so that runs are easy to read and compare."""
    content = result.model_dump(mode="json")
    rounds = ",\n".join("  " + json.dumps(each) for each in content["rounds"])
    frame = json.dumps(content | {"rounds": []}, indent=1)
    return frame.replace('"rounds": []', f'"rounds": [\n{rounds}\n ]', 1) + "\n"


def result_of_today(program: str, directory: Path) -> Result | None:
    """The result that `write_result` wrote earlier today, if any."""
    path = directory / f"{today()}-{program}.json"
    return Result.model_validate_json(path.read_bytes()) if path.exists() else None


def round_figures(report: RoundReport) -> dict[str, Any]:
    """The figures of one engine's round, rounded to the clock's precision."""
    figures: dict[str, Any] = {
        "tokens_per_second": round(report.tokens_per_second, 2),
        "mean_ttft_seconds": round(report.mean_ttft_seconds, 4),
        "mean_tpot_seconds": round(report.mean_tpot_seconds, 5),
        "engine_cpu_seconds": round(report.engine_cpu_seconds, 3),
        "whole": window_figures(report.stages),
        "steady": None,
    }
    # A stage counts a step after the engine knows of it: a window of few steps may contain none of them.
    if report.steady_stages and all(stage.steps for stage in report.steady_stages):
        figures["steady"] = window_figures(report.steady_stages)
    return figures


def window_figures(windows: tuple[StageSeconds, ...]) -> dict[str, Any]:
    """A window's pipeline figures, and each stage's seconds by state."""
    figures = pipeline_figures(windows)
    return {
        "bubble_ratio": round(figures.bubble_ratio, 4),
        "bottleneck_share": round(figures.bottleneck_share, 4),
        "imbalance": round(figures.imbalance, 4),
        "host_seconds_per_step": round(figures.host_seconds_per_step, 6),
        "clock_error": round(figures.clock_error, 5),
        "stages": [
            {
                "busy": {kind: round(seconds, 4) for kind, seconds in window.busy.items() if seconds},
                "wait": {reason: round(seconds, 4) for reason, seconds in window.wait.items() if seconds},
                "idle": round(window.idle, 4),
                "wall": round(window.wall, 4),
                "steps": int(window.steps),
            }
            for window in windows
        ],
    }


def median_of(rounds: list[dict[str, Any]], *path: str) -> float | None:
    """Median over the rounds of the figure at `path`; None if no round has it."""
    values = [value for one in rounds if (value := _at(one, path)) is not None]
    return median(values) if values else None


def _at(figures: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if not figures:
            return None
        figures = figures.get(name)
    return figures
