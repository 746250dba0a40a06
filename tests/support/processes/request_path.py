"""The files that a streamed chat request runs, in order of first use, from records of several requests.

Not all that runs during a request is done for it, and processes run side by side, so one record alone would differ from
run to run. What counts is this:

- A call that is also made while nobody asks, through the same chain of callers, is background work. It counts only if
  it leads to one that is not.
- A file is on the path when each request makes some call in it that counts.
- It is on the way in when in each request the first such call came before stage 0's first embedding; what only runs
  beside that, and comes sooner at one time and later at another, is on the way back.

Files whose code does not run, such as those of types alone, are not seen. A file that a request only uses just as
background work does is left out too, and named in `background`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import PurePath
from statistics import median
from typing import Any, Final

from processes.call_recorder import ROOT, Function, Record
from processes.recorded_requests import STAGE_0, RecordedRequests, Records

EMBEDDING: Final = "embed"
"""The function of a stage's model that looks up the embedding of a step's tokens: the first of its computation."""


@dataclass(frozen=True, slots=True)
class FirstUse:
    """Of a file by one request."""

    nanoseconds: int
    process: str
    function: Function


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedFile:
    """A file on the path."""

    file: str
    lines: int
    processes: tuple[str, ...]
    """Which use it; who is first does so first."""
    function: str
    """The first of its functions that is called, in the first request."""
    milliseconds: float
    """From the request's first call to the file's first use: the median of the requests, slowed by recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPath:
    """Both ways of a request, each in order of first use."""

    way_in: tuple[UsedFile, ...]
    """Up to stage 0's first embedding."""
    way_back: tuple[UsedFile, ...]
    """What is first used after that."""
    background: tuple[str, ...]
    """Used during requests only as it is while nobody asks."""
    not_always: tuple[str, ...]
    """Used by some of the requests."""


def path_of(recorded: RecordedRequests) -> RequestPath:
    """What a request runs.

    Raises:
        AssertionError: a request was computed without `EMBEDDING`.
    """
    uses = [_first_uses(request, recorded.pause) for request in recorded.requests]
    embeddings = [_first_embedding(request[STAGE_0]) for request in recorded.requests]
    always = [file for file in uses[0] if all(file in use for use in uses)]
    path = sorted((_used_file(file, uses) for file in always), key=lambda used: used.milliseconds)
    before = {
        file for file in always if all(use[file][0].nanoseconds <= at for use, at in zip(uses, embeddings, strict=True))
    }
    sometimes = {file for use in uses for file in use}
    seen = {chain[0].file for request in recorded.requests for record in request.values() for chain in record}
    return RequestPath(
        way_in=tuple(used for used in path if used.file in before),
        way_back=tuple(used for used in path if used.file not in before),
        background=tuple(sorted(seen - sometimes)),
        not_always=tuple(sorted(sometimes - set(always))),
    )


def _first_uses(request: Records, pause: Records) -> dict[str, list[FirstUse]]:
    """Per file, in order of first use: one of each process that uses it for the request, the earliest first."""
    uses = sorted(
        (use for process, record in request.items() for use in _uses_of(process, record, pause[process])),
        key=lambda use: use.nanoseconds,
    )
    firsts: dict[str, dict[str, FirstUse]] = {}
    for use in uses:
        firsts.setdefault(use.function.file, {}).setdefault(use.process, use)
    return {file: list(by_process.values()) for file, by_process in firsts.items()}


def _uses_of(process: str, record: Record, pause: Record) -> Iterator[FirstUse]:
    """Calls that count, each after those that led to it; callers that ran before the record began are none of them."""
    for chain in record.keys() - pause.keys():
        for depth in reversed(range(len(chain))):
            if chain[depth:] in record:
                yield FirstUse(record[chain], process, chain[depth])


def _first_embedding(record: Record) -> int:
    at = [nanoseconds for chain, nanoseconds in record.items() if chain[0].name.rpartition(".")[2] == EMBEDDING]
    assert at, f"{STAGE_0} called no {EMBEDDING}"
    return min(at)


def _used_file(file: str, uses: Sequence[dict[str, list[FirstUse]]]) -> UsedFile:
    begins = [min(of_file[0].nanoseconds for of_file in use.values()) for use in uses]
    waits = [use[file][0].nanoseconds - begin for use, begin in zip(uses, begins, strict=True)]
    first = uses[0][file]
    return UsedFile(
        file=file,
        lines=len((ROOT / file).read_text(encoding="utf-8").splitlines()),
        processes=tuple(use.process for use in first),
        function=first[0].function.name,
        milliseconds=median(waits) / 1e6,
    )


def package_crossings(path: Sequence[UsedFile]) -> int:
    """How often the next file in order lies in another package than the one before."""
    packages = [PurePath(used.file).parent for used in path]
    return sum(one != other for one, other in pairwise(packages))


def as_json(path: RequestPath) -> dict[str, Any]:
    """For programs."""
    return asdict(path)


def as_text(path: RequestPath, num_requests: int) -> str:
    """For people: a table, the totals, and what was left out."""
    lines = [f"{'':>3} {'ms':>7}  {'lines':>5}  {'first function':44}  file and processes"]
    lines += [_row(number, used) for number, used in enumerate(path.way_in, 1)]
    lines += ["    ---- first embedding ----"]
    lines += [_row(number, used) for number, used in enumerate(path.way_back, len(path.way_in) + 1)]
    lines += [
        "",
        _total("the way in, up to the first embedding", path.way_in),
        _total("the way back, first used after it", path.way_back),
        _total("together", (*path.way_in, *path.way_back)),
        "",
        f"Each file was used by each of {num_requests} requests, recorded one by one; those on the way in before the",
        "first embedding each time. Calls that are also made while nobody asks, by the same callers, don't count.",
        *_left_out("all their calls are such", path.background),
        *_left_out("only some requests used them", path.not_always),
    ]
    return "\n".join(lines)


def _row(number: int, used: UsedFile) -> str:
    processes = ", ".join(used.processes)
    return f"{number:>3} {used.milliseconds:7.1f}  {used.lines:5}  {used.function:44}  {used.file} ({processes})"


def _total(what: str, path: Sequence[UsedFile]) -> str:
    lines = sum(used.lines for used in path)
    return f"{what}: {len(path)} files, {lines} lines, {package_crossings(path)} crossings between packages"


def _left_out(why: str, files: Sequence[str]) -> list[str]:
    return [f"Left out, because {why}:", *(f"    {file}" for file in files)] if files else []
