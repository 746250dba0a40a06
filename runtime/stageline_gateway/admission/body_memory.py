"""What requests' bodies hold of this gateway's memory, from their first byte to their answer's last, and its limit.

A body counts as it comes, so a slow sender holds what it has sent and no more. It counts until its request is over,
because its prompt is kept that long: another engine may have to be asked. Nothing waits here for room: whatever would
go over the limit is refused, and gives back what it held.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from stageline_gateway.errors import ApiError


@dataclass(slots=True)
class Intake:
    """All bodies. `on_change` is told the bytes held."""

    limit_bytes: int = 128 * 1024 * 1024
    retry_after_seconds: float = 2.0
    on_change: Callable[[int], None] = lambda _: None
    held_bytes: int = 0
    most_held_bytes: int = 0
    """The highest that `held_bytes` ever was."""
    num_reading: int = 0
    """Requests whose bodies are still coming."""

    def check_room(self, size_bytes: int) -> None:
        """Raise ApiError 503 when so many bytes more have no room."""
        if self.held_bytes + size_bytes > self.limit_bytes:
            message = f"The bodies of open requests hold {self.held_bytes} bytes, and there is no room for this one."
            wait_seconds = self.retry_after_seconds
            raise ApiError(503, message, "server_error", code="body_room", retry_after_seconds=wait_seconds)

    def add(self, size_bytes: int) -> None:
        """Count bytes that came (or, negative, that are gone)."""
        self.held_bytes += size_bytes
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
        self.on_change(self.held_bytes)


@dataclass(slots=True)
class BodyHold:
    """One request's part. As a context it gives everything back at its end.

    `keep` leaves that to who was handed it, unless the context ends with an error.
    """

    intake: Intake
    size_bytes: int = 0
    _is_reading: bool = False
    _is_kept: bool = False

    def __enter__(self) -> Self:
        """The body is going to be read."""
        self._is_reading = True
        self.intake.num_reading += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The body has been read, or won't be."""
        self.has_come()
        if error is not None or not self._is_kept:
            self.give_back()

    def grow(self, size_bytes: int) -> None:
        """Bytes came; raises ApiError 503 when they have no room."""
        self.intake.check_room(size_bytes)
        self.size_bytes += size_bytes
        self.intake.add(size_bytes)

    def has_come(self) -> None:
        """All of the body is here; once is enough."""
        if self._is_reading:
            self._is_reading = False
            self.intake.num_reading -= 1

    def keep(self) -> Self:
        """Somebody else calls `give_back`."""
        self._is_kept = True
        return self

    def give_back(self) -> None:
        """The request is over; once is enough."""
        held, self.size_bytes = self.size_bytes, 0
        if held:
            self.intake.add(-held)
