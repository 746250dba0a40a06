"""Reads YAML strictly: no duplicate keys, no implicit dates, bounded alias expansion, one sentence for each refusal.

Accepts only what JSON can express, so that a document means the same here and in `kubectl`. Uses the Python parser: the
C parser overflows its stack on deep nesting, where this one raises.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from stageline_api.resource.field_problem import show_value

LARGEST_FILE_BYTES: Final = 262_144
MAX_NODES: Final = 50_000
"""Maximum number of values in one document after aliases are expanded."""

_MERGE_TAG: Final = "tag:yaml.org,2002:merge"
_STRING_TAG: Final = "tag:yaml.org,2002:str"
_JSON_TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq")
)


class UnreadableYamlError(Exception):
    """The file can't be read as YAML documents; the message is a sentence with the line if it is known."""


class _JsonLikeLoader(yaml.SafeLoader):
    """A safe loader that keeps dates as strings, because JSON has none."""


_JsonLikeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_documents(path: Path) -> list[tuple[int, Any]]:
    """Every non-empty document: its number in the file (from 1) and its value. Raises `UnreadableYamlError`."""
    text = _read_text(path)
    try:
        return list(_documents(text))
    except RecursionError:
        raise UnreadableYamlError("is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        raise UnreadableYamlError(_sentence(error)) from None
    except yaml.reader.ReaderError as error:
        character = f"U+{error.character:04X}" if isinstance(error.character, int) else repr(error.character)
        raise UnreadableYamlError(f"holds the character {character}, which YAML does not allow") from None


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise UnreadableYamlError(f"can't be read: {error.strerror or error}") from None
    if len(data) > LARGEST_FILE_BYTES:
        raise UnreadableYamlError(f"is larger than {LARGEST_FILE_BYTES} bytes, too large for a PipelineModel")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UnreadableYamlError(f"line {line}: is not UTF-8 text") from None


def _documents(text: str) -> Iterator[tuple[int, Any]]:
    loader = _JsonLikeLoader(text)
    number = 0
    try:
        while loader.check_node():
            number += 1
            node = loader.get_node()
            if node is None:
                continue
            _NodeCheck().check(node)
            try:
                value = loader.construct_document(node)
            except (ValueError, KeyError, OverflowError) as error:
                # PyYAML converts without checks: "!!int x", "!!bool x", or an integer of thousands of digits.
                raise UnreadableYamlError(
                    f"document at {_place(node.start_mark)}: holds a malformed value ({error})"
                ) from None
            if value is not None:
                yield number, value
    finally:
        loader.dispose()


class _NodeCheck:
    """Walks a node graph once: counts values with aliases expanded, and finds loops, duplicate keys and
    foreign tags.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int | None] = {}

    def check(self, node: yaml.Node) -> int:
        """Number of values in `node`, itself included, with aliases expanded."""
        known = self._sizes.get(id(node), 0)
        if known is None:
            raise UnreadableYamlError(f"{_place(node.start_mark)}: an alias contains itself")
        if known:
            return known
        if node.tag not in _JSON_TAGS:
            raise UnreadableYamlError(f"{_place(node.start_mark)}: the tag {show_value(node.tag)} is not allowed")
        self._sizes[id(node)] = None
        size = 1
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
            size += sum(self.check(value) for _, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            size += sum(self.check(item) for item in node.value)
        if size > MAX_NODES:
            raise UnreadableYamlError(
                f"{_place(node.start_mark)}: holds more than {MAX_NODES} values once aliases are followed"
            )
        self._sizes[id(node)] = size
        return size


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag not in (_STRING_TAG, _MERGE_TAG):
            raise UnreadableYamlError(f"{_place(key.start_mark)}: a key must be a string; put it in quotes")
        if key.value in seen:
            raise UnreadableYamlError(
                f"{_place(key.start_mark)}: the key {show_value(key.value)} is given twice in one mapping"
            )
        seen.add(key.value)


def _place(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


def _sentence(error: yaml.MarkedYAMLError) -> str:
    place = "" if error.problem_mark is None else f"{_place(error.problem_mark)}: "
    context = "" if error.context is None else f" {error.context}"
    return f"{place}is not valid YAML: {error.problem}{context}".replace("\n", " ")
