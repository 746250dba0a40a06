"""Reads the state clocks of all stages of a group from their metrics endpoints, at about the same time."""

import asyncio
import urllib.request
from collections.abc import Sequence

from stageline_api import ports
from stageline_bench.runtime.record.stage_clock import StageSeconds, parse_stage_seconds

TIMEOUT_SECONDS = 10.0


class StageScraper:
    """Holds the stages' addresses."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)

    async def read_all(self) -> tuple[StageSeconds, ...]:
        """One reading per stage, in stage order; each stage's states add up to its own wall time."""
        pages = await asyncio.gather(*(asyncio.to_thread(_page, address) for address in self._addresses))
        return tuple(map(parse_stage_seconds, pages))


def _page(address: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}:{ports.STAGE_HEALTH}/metrics", timeout=TIMEOUT_SECONDS) as answer:
        return str(answer.read(), "utf-8")
