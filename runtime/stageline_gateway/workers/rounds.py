"""What all workers say on a topic: asked of each that serves, and answered when all have, or when the time is over.

A place whose worker has ended speaks by the last that it told of its counters, so that nothing is missing meanwhile.
Who is asked and does not answer is named, and whoever asked shows no sum without it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from stageline_gateway.workers.messages import Answered, Ask, Said, Tell, Told

PATIENCE_SECONDS: Final = 5.0
COUNTERS: Final = "counters"
"""The topic that is kept. On others only those speak that are alive."""


@dataclass(slots=True)
class _Round:
    asker: int
    number: int
    """As the asker has it."""
    topic: str
    until_seconds: float
    missing: set[int]
    said: dict[int, Said]


@dataclass(slots=True)
class Rounds:
    """`tell` asks a worker, `answer` answers one; both by its place."""

    tell: Callable[[int, Tell], None]
    answer: Callable[[int, Answered], None]
    _last: dict[int, bytes] = field(default_factory=dict)
    _open: dict[int, _Round] = field(default_factory=dict)
    _number: int = 0

    def last_of(self, worker: int) -> bytes:
        """What a place has counted, as far as it told; empty before it told anything."""
        return self._last.get(worker, b"")

    def begin(self, asker: int, ask: Ask, serving: Mapping[int, bool], now_seconds: float) -> None:
        """`serving` says of each place whether its worker is there to be asked."""
        self._number += 1
        there = {worker for worker, is_there in serving.items() if is_there}
        kept = serving.keys() - there if ask.topic == COUNTERS else set()
        said = {worker: Said(worker, False, self.last_of(worker)) for worker in kept}
        number = self._number
        self._open[number] = _Round(asker, ask.number, ask.topic, now_seconds + PATIENCE_SECONDS, set(there), said)
        for worker in sorted(there):
            self.tell(worker, Tell(number, ask.topic))
        self._end_if_complete(number)

    def told(self, worker: int, told: Told) -> None:
        if told.topic == COUNTERS:
            self._last[worker] = told.body
        found = self._open.get(told.number)
        if found is not None and worker in found.missing:
            found.missing.discard(worker)
            found.said[worker] = Said(worker, True, told.body)
            self._end_if_complete(told.number)

    def has_ended(self, worker: int) -> None:
        """Nobody waits for a worker that is no more, and it waits for nobody."""
        for number, one in list(self._open.items()):
            if one.asker == worker:
                del self._open[number]
            elif worker in one.missing:
                one.missing.discard(worker)
                if one.topic == COUNTERS:
                    one.said[worker] = Said(worker, False, self.last_of(worker))
                self._end_if_complete(number)

    def expire(self, now_seconds: float) -> None:
        for number, one in list(self._open.items()):
            if now_seconds >= one.until_seconds:
                self._end(number, one.missing)

    def _end_if_complete(self, number: int) -> None:
        if not self._open[number].missing:
            self._end(number, ())

    def _end(self, number: int, silent: Iterable[int]) -> None:
        one = self._open.pop(number)
        said = tuple(one.said[worker] for worker in sorted(one.said))
        self.answer(one.asker, Answered(one.number, said, tuple(sorted(silent))))
