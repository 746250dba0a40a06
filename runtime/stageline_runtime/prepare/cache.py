"""The model cache on disk: where an entry lives, what makes it complete. Reads only; `publish` writes.

An entry is `<cache_dir>/<key>/`, a Hugging Face directory plus a manifest. Where weights come in shards, the entry is
complete without them: its manifest lists them, and each is there once a stage that needs it has fetched it. The key
follows from the canonical source and the converter's version, so an engine finds the directory without asking anyone,
and a new converter never reads what an older one wrote. A `file://` source is used where it is and never copied.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from stageline_api.resource.serving.model_source import FileSource, parse_source

CONVERTER_VERSION = 2
"""Raised whenever the same source would give other files."""
MANIFEST_NAME = "stageline-manifest.json"
_KEY = re.compile(r"[0-9a-f]{32}")


class ExpectedFile(BaseModel):
    """What a file will be once it is fetched, as far as its source tells."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int | None
    sha256: str | None
    git_sha1: str | None = None
    """Git's name for the content, which is all that there is for files that a repository holds itself."""


class Manifest(BaseModel):
    """What an entry holds. Written last, before the entry is published."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    """Canonical source."""
    resolved: str
    """What the source stood for when it was fetched: a commit, a file's SHA-256."""
    converter_version: int
    files: dict[str, int]
    """Size in bytes of every file that the entry was published with, by path relative to the entry."""
    shards: dict[str, ExpectedFile] = {}
    """Weight files that are fetched one by one, by name; each has a size."""


def cache_key(canonical_source: str) -> str:
    """Name of the entry's directory: 32 hexadecimal digits."""
    return hashlib.sha256(f"{canonical_source}\n{CONVERTER_VERSION}".encode()).hexdigest()[:32]


def is_key(name: str) -> bool:
    """Whether a directory of this name in a cache is an entry."""
    return _KEY.fullmatch(name) is not None


def prepared_model_dir(config_source: str, cache_dir: Path) -> Path:
    """Where the model of a source is, or will be once prepared. Computes a path; touches no disk.

    Raises:
        SourceError: `config_source` is not a model source.
    """
    source = parse_source(config_source)
    return Path(source.path) if isinstance(source, FileSource) else cache_dir / cache_key(source.canonical)


def read_manifest(entry: Path) -> Manifest | None:
    """The entry's manifest, or None when there is none that can be read."""
    try:
        return Manifest.model_validate_json((entry / MANIFEST_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def entry_problem(entry: Path) -> str | None:
    """Why `entry` is not a complete cache entry, or None when it is: every file present with its size."""
    manifest = read_manifest(entry)
    if manifest is None:
        return "its manifest is missing or damaged"
    for name, size in manifest.files.items():
        path = entry / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def missing_shards(entry: Path, names: Iterable[str] | None = None) -> list[str]:
    """Those of the shards `names` (None: of all) that the manifest lists and that are missing or of another size."""
    manifest = read_manifest(entry)
    if manifest is None:
        return []
    asked = manifest.shards.keys() if names is None else manifest.shards.keys() & set(names)
    return [name for name in sorted(asked) if not _has_size(entry / name, manifest.shards[name].size_bytes)]


def _has_size(path: Path, size_bytes: int | None) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes


def files_with_sizes(directory: Path) -> dict[str, int]:
    """Every file below `directory` except a manifest, by relative path."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.stat().st_size for path in files if path.name != MANIFEST_NAME}


def bytes_below(directory: Path) -> int:
    """Sum of the sizes of all files below `directory`. A file may disappear during the scan."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total
