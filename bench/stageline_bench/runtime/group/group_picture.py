"""Draws what the stages of a benchmark's group last did: their timelines, on the one clock of this machine."""

from pathlib import Path
from typing import Final

import httpx

from stageline_api import ports
from stageline_api.errors import UserError
from stageline_api.telemetry.timeline import StageEndpoint
from stageline_bench.runtime.group.bench_group import INCARNATION, BenchGroup
from stageline_runtime.trace.collect import StageReader
from stageline_runtime.trace.lanes import common_window
from stageline_runtime.trace.picture import busiest_window, draw_timeline

PLANS: Final = 24


def draw_group(group: BenchGroup, picture: Path) -> None:
    """Write the picture of the busiest plans that the stages still hold.

    Raises:
        UserError: a stage doesn't answer, or the file can't be written.
    """
    timelines = []
    with httpx.Client(trust_env=False) as http:
        for stage, address in enumerate(group.addresses):
            endpoint = StageEndpoint(stage=stage, host=address, health_url=f"http://{address}:{ports.STAGE_HEALTH}")
            reader = StageReader(http, endpoint, INCARNATION)
            reader.read()
            timelines.append(reader.timeline(0, 0))
    window = busiest_window(timelines, common_window(timelines), plans=PLANS)
    title = f"{group.shape.name}, {len(timelines)} stages"
    try:
        picture.write_text(draw_timeline(timelines, window, title=title), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--picture {picture}: it can't be written: {error.strerror}") from error
