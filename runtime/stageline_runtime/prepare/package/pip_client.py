"""Asks pip which wheel a pinned distribution is and downloads it; pip's own configuration decides from where.

Only wheels are taken, never source archives: nothing from the package is run. pip's progress lines are read from its
standard output, its errors become one sentence. A pip that is left behind ends at its next progress line.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stageline_runtime.prepare.errors import WITHOUT_THE_NETWORK, BadConfigError, PrepareError

COMMON_OPTIONS = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input")
UNANSWERED = re.compile(r"connection broken by|Could not fetch URL (?!.*: 404 Client Error)")
"""What pip's log says where an index gave no answer: it broke off, or the status is another than "not found"."""


@dataclass(frozen=True, slots=True)
class IndexedWheel:
    """A wheel as the index describes it. `sha256` is None where the index (a plain directory) gives no hash."""

    requirement: str
    sha256: str | None


def find_wheel(requirement: str, scratch: Path) -> IndexedWheel:
    """Resolve `distribution==version` with pip and learn the hash that the index promises.

    Raises:
        PrepareError: no network, or no pip.
        BadConfigError: the index answers, and has no such wheel.
    """
    report_file = scratch / "report.json"
    options = ("--dry-run", "--ignore-installed", "--quiet", "--report", str(report_file))
    with _pip("install", *COMMON_OPTIONS, *options, requirement, scratch=scratch, requirement=requirement):
        pass
    report = json.loads(report_file.read_text(encoding="utf-8"))
    hashes = report["install"][0]["download_info"].get("archive_info", {}).get("hashes", {})
    return IndexedWheel(requirement, hashes.get("sha256"))


def download_wheel(wheel: IndexedWheel, scratch: Path, on_progress: Callable[[int, int], None]) -> Path:
    """Download the wheel into `scratch` and check its hash. `on_progress` gets the bytes done and the total.

    Raises:
        PrepareError: the download failed, or the file isn't the one that the index promised.
    """
    target = scratch / "wheel"
    options = ("--progress-bar", "raw", "--dest", str(target))
    with _pip(
        "download", *COMMON_OPTIONS, *options, wheel.requirement, scratch=scratch, requirement=wheel.requirement
    ) as lines:
        for line in lines:
            match line.split():
                case ["Progress", done, "of", total] if done.isdigit() and total.isdigit():
                    on_progress(int(done), int(total))
                case _:
                    pass
    path = next(target.glob("*.whl"))
    if wheel.sha256 is not None and (actual := sha256_of(path)) != wheel.sha256:
        raise PrepareError(
            f"the downloaded {path.name} has SHA-256 {actual}, but the package index promises {wheel.sha256}"
        )
    return path


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _pip(*arguments: str, scratch: Path, requirement: str) -> Iterator[Iterator[str]]:
    """Run pip and give its output lines; its temporary files stay within `scratch`, on the cache's disk."""
    temporary = scratch / "tmp"
    temporary.mkdir(exist_ok=True)
    errors_file, log_file = scratch / "pip-errors.txt", scratch / "pip-log.txt"
    with errors_file.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", "--log", str(log_file), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
    assert process.stdout is not None
    try:
        yield iter(process.stdout)
        process.stdout.read()
        status = process.wait()
    finally:
        process.stdout.close()
        if process.poll() is None:
            process.kill()
            process.wait()
    if status != 0:
        log = _text(log_file)
        raise _failure(requirement, _text(errors_file), index_answered=not UNANSWERED.search(log))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _failure(requirement: str, errors: str, *, index_answered: bool) -> PrepareError:
    # pip says "no matching distribution" also when it never got an answer, so that is looked at first.
    if "No matching distribution found" in errors and index_answered:
        return BadConfigError(
            f"the package index has no wheel of {requirement}; check its name and version, and the index"
        )
    return PrepareError(_explain(requirement, errors, index_answered=index_answered))


def _explain(requirement: str, errors: str, *, index_answered: bool) -> str:
    if "No module named pip" in errors:
        return "pip is not installed in this environment; install the extra stageline[prepare]"
    if "No space left on device" in errors:
        return f"cannot download {requirement}: the disk is full"
    if not index_answered:
        return f"cannot download {requirement}: the package index can't be reached; {WITHOUT_THE_NETWORK}"
    told = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.startswith("ERROR: ")]
    return f"pip cannot download {requirement}: {told[-1] if told else 'it gave no reason'}"
