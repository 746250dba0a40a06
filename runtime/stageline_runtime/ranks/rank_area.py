"""The memory that the ranks of one stage share: an anonymous file, which needs neither a writable root nor a mount.

The supervisor makes it (`RankArea.create`), and its rank processes inherit the descriptor. Its layout is that of
`native/rank_exchange.h`; the ranks call the functions of that header. This module only creates, inspects and ends the
area, so that the supervisor needs neither torch nor compiled code.
"""

import ctypes
import mmap
import os
from typing import Final

NAME_BYTES: Final = 96
KIND_NAMES: Final = ("all-reduce", "all-gather", "reduce-scatter")
_MAGIC: Final = 0x736C726B
_ALIGNMENT: Final = 128


class Round(ctypes.Structure):
    """What one exchange is, as every rank must describe it alike."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("type", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("name", ctypes.c_char * NAME_BYTES),
    )

    def __str__(self) -> str:
        return f"{self.name.decode(errors='replace')} ({KIND_NAMES[self.kind]} of {self.count} elements)"


class Progress(ctypes.Structure):
    """An exchange under way, in its rank's own memory."""

    _fields_ = (
        ("round", Round),
        ("done", ctypes.c_int64),
        ("rounds", ctypes.c_uint32),
        ("is_published", ctypes.c_uint32),
        ("differs", ctypes.c_int64),
    )


class _Place(ctypes.Structure):
    """Where a rank says how far it is."""

    _fields_ = (
        ("published", ctypes.c_uint32),
        ("sleepers", ctypes.c_uint32),
        ("rounds", Round * 2),
        ("padding", ctypes.c_char * 8),
    )


class _Head(ctypes.Structure):
    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("ended", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("buffer_bytes", ctypes.c_int64),
        ("padding", ctypes.c_char * 104),
    )


def area_bytes(size: int, buffer_bytes: int) -> int:
    """Of an area for `size` ranks, each with two buffers."""
    return ctypes.sizeof(_Head) + size * (ctypes.sizeof(_Place) + 2 * buffer_bytes)


class RankArea:
    """The memory that the ranks of one stage share, mapped into this process."""

    def __init__(self, descriptor: int) -> None:
        """Map the area behind `descriptor`, which may be closed afterwards; raises ValueError when it is none."""
        self._memory = mmap.mmap(descriptor, 0)
        self._head = _Head.from_buffer(self._memory)
        self.address = ctypes.addressof(self._head)
        self.size = int(self._head.size)
        self.buffer_bytes = int(self._head.buffer_bytes)
        is_area = self._head.magic == _MAGIC and len(self._memory) == area_bytes(self.size, self.buffer_bytes)
        if not is_area:
            raise ValueError(f"descriptor {descriptor} is no area of ranks")
        self._places = (_Place * self.size).from_buffer(self._memory, ctypes.sizeof(_Head))

    @staticmethod
    def create(size: int, buffer_bytes: int) -> int:
        """A descriptor of a new area for `size` ranks. Exchanges of more than `buffer_bytes` take several rounds.

        Raises:
            ValueError: a buffer would not hold one element for each rank.
        """
        if size < 1 or buffer_bytes < 8 * size:
            raise ValueError(f"an area of {size} ranks with buffers of {buffer_bytes} bytes")
        buffer_bytes = -(-buffer_bytes // _ALIGNMENT) * _ALIGNMENT
        descriptor = os.memfd_create("stageline-ranks")
        os.ftruncate(descriptor, area_bytes(size, buffer_bytes))
        os.pwrite(descriptor, bytes(_Head(magic=_MAGIC, size=size, buffer_bytes=buffer_bytes)), 0)
        return descriptor

    def end(self) -> None:
        """Let every rank that waits, now or later, fail with `RanksEndedError`: within a tenth of a second."""
        self._head.ended = 1

    @property
    def is_ended(self) -> bool:
        return bool(self._head.ended)

    def tell(self, rank: int, rounds: int) -> None:
        """Record that `rank` has reached so many rounds, for exchanges outside the area. Only that rank calls it, for
        one area."""
        self._places[rank].published = rounds

    def ranks_before(self, rounds: int) -> tuple[int, ...]:
        """The ranks that have not reached round number `rounds`, counted from 1; for any thread of any process."""
        return tuple(rank for rank, count in enumerate(self.rounds()) if ctypes.c_int32(count - rounds).value < 0)

    def rounds(self) -> list[int]:
        """How many rounds each rank has reached, modulo 2^32; for any thread of any process."""
        return [int(place.published) for place in self._places]

    def late_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that have not reached the exchange that `rank` is at; for any thread of any process."""
        return self.ranks_before(self.rounds()[rank])

    def close(self) -> None:
        """Unmap the area in this process."""
        del self._places, self._head
        self._memory.close()
