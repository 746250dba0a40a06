"""Polls a source repeatedly, and keeps the readings to compare with.

Stages and engines are compared with the previous poll, so that a replaced group has figures from its second poll on.
Gateways are compared with the oldest poll of a time window, because requests are rarer than steps. If a poll fails, the
last objects stay, with the error.
"""

from collections import deque
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from stageline_api.errors import UserError
from stageline_cli.on_call.facts.facts import Snapshot
from stageline_cli.on_call.facts.scrape import Reading, read_all
from stageline_cli.on_call.facts.snapshot import build_snapshot
from stageline_cli.on_call.sources.choose_source import one_model
from stageline_cli.on_call.sources.source import ModelObjects, Source

TRAFFIC_WINDOW_SECONDS: Final = 15.0


class Watch:
    """All models of a source, or the one called `name`."""

    def __init__(self, source: Source, name: str | None) -> None:
        self._source = source
        self._name = name
        self._models: list[ModelObjects] = []
        self._past: deque[Reading] = deque()
        self._snapshot: Snapshot | None = None

    def latest(self) -> Snapshot:
        return self._snapshot or self.look()

    def look(self) -> Snapshot:
        """Poll now. The first poll raises `UserError` if there is no model; later ones show it."""
        trouble = self._read_objects()
        later = read_all(self._source.http, self._models)
        earlier = self._compared_with(later)
        self._past.append(later)
        snapshot = build_snapshot(self._source.where, self._models, earlier, later, datetime.now(UTC))
        self._snapshot = replace(snapshot, problems=(*trouble, *snapshot.problems))
        return self._snapshot

    def _read_objects(self) -> tuple[str, ...]:
        try:
            self._models = self._source.models(None) if self._name is None else [one_model(self._source, self._name)]
        except UserError as error:
            if not self._past:
                raise
            return (f"shown as last seen: {error.message}",)
        return ()

    def _compared_with(self, later: Reading) -> Reading:
        while len(self._past) > 1 and self._past[1].at_seconds < later.at_seconds - TRAFFIC_WINDOW_SECONDS:
            self._past.popleft()
        if not self._past:
            return Reading()
        oldest, last = self._past[0], self._past[-1]
        return replace(last, gateways=oldest.gateways, gateways_at_seconds=oldest.gateways_at_seconds)
