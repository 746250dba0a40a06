"""Runs `stageline` with a recorder of its calls: `python call_recorder.py RECORDS ARGUMENTS…`, e.g. `… engine`.

One real-time signal begins a record and the next one ends it; no component takes these for itself. The n-th record
becomes the file `RECORDS-n.json`; `RECORDS-n.began` says that it has begun. Between records the main thread has no
profile function; other threads must have one from their start (Python 3.11 can't give them one later), which does
nothing then.

A record holds each distinct chain of calls among the project's own functions, and when it was first called on the
monotonic clock, which all processes of a machine share. Importing a module is not a call of its functions, and is not
recorded.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[3]
PROJECT_FOLDERS: Final = ("operator", "runtime")
_PROJECT: Final = tuple(f"{ROOT / folder}{os.sep}" for folder in PROJECT_FOLDERS)
_BEGIN: Final = signal.SIGRTMIN + 4
_END: Final = signal.SIGRTMIN + 5


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the project; `file` is relative to the repository's root."""

    file: str
    name: str
    """With the class or function around it, as in `__qualname__`."""


Chain = tuple[Function, ...]
"""A function, who called it, who called that one, and so on."""
Record = dict[Chain, int]
"""When each chain was first called, in nanoseconds of the monotonic clock."""


class _Recorder:
    """The end inside the recorded process; signals are handled by its main thread, as Python does with all signals."""

    def __init__(self, records: str) -> None:
        self._records = records
        self._count = 0
        self._calls: dict[tuple[CodeType, ...], int] | None = None
        """None while nothing is recorded."""

    def install(self) -> None:
        threading.setprofile(self._profile)
        signal.signal(_BEGIN, self._begin)
        signal.signal(_END, self._end)

    def _begin(self, _signal: int, _frame: FrameType | None) -> None:
        self._calls = {}
        sys.setprofile(self._profile)
        Path(f"{self._records}-{self._count}.began").touch()

    def _end(self, _signal: int, _frame: FrameType | None) -> None:
        sys.setprofile(None)
        calls, self._calls = self._calls, None
        _write_record(Path(f"{self._records}-{self._count}.json"), calls or {})
        self._count += 1

    def _profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        calls = self._calls
        if calls is not None and event == "call" and _is_project(frame) and frame.f_code.co_name != "<module>":
            calls.setdefault(_chain(frame), time.monotonic_ns())


def _is_project(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PROJECT)


def _chain(frame: FrameType) -> tuple[CodeType, ...]:
    codes: list[CodeType] = []
    caller: FrameType | None = frame
    while caller is not None:
        if _is_project(caller):
            codes.append(caller.f_code)
        caller = caller.f_back
    return tuple(codes)


def _write_record(path: Path, calls: dict[tuple[CodeType, ...], int]) -> None:
    """By rename, so that who sees the file sees all of it."""
    # A copy: another thread may have been in the middle of its last entry.
    entries = [
        [nanoseconds, [[str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname] for code in chain]]
        for chain, nanoseconds in calls.copy().items()
    ]
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(entries), encoding="utf-8")
    unfinished.rename(path)


class RecordedProcess:
    """The end outside: begins and ends records of a process that was started with `recorded`, by signals to it."""

    def __init__(self, send_signal: Callable[[int], None], records: Path) -> None:
        self._send_signal = send_signal
        self._records = records
        self._count = 0

    def begin(self, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Begin a record; `wait` waits until what it is given holds."""
        self._send_signal(_BEGIN)
        wait(Path(f"{self._records}-{self._count}.began").exists)

    def end(self, wait: Callable[[Callable[[], bool]], None]) -> Record:
        """End the record that was begun, and return it."""
        written = Path(f"{self._records}-{self._count}.json")
        self._send_signal(_END)
        wait(written.exists)
        self._count += 1
        return {
            tuple(Function(*function) for function in chain): nanoseconds
            for nanoseconds, chain in json.loads(written.read_text(encoding="utf-8"))
        }


def recorded(records: Path, *arguments: str) -> tuple[str, ...]:
    """Arguments of the interpreter that run `stageline` with a recorder."""
    return (__file__, str(records), *arguments)


def main() -> None:
    records, *arguments = sys.argv[1:]
    _Recorder(records).install()
    from stageline_cli.main import main as stageline

    stageline(arguments)


if __name__ == "__main__":
    main()
