"""What a model's files beside `tokenizer.json` say of its tokens, in the order in which transformers believes them.

`added_tokens_decoder` of `tokenizer_config.json` stands for all of it where it is there. Models of before have
`special_tokens_map.json`, which then wins over the config's own special tokens, and `added_tokens.json`. What all of
them declare is in the tokenizer, whether `tokenizer.json` has it or not, and their flags win over those there. Pure.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from stageline_runtime.model_facts.model_fields import Fields, UnsupportedModelError, read_json

TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"
_MAP_FILE: Final = "special_tokens_map.json"
_ADDED_FILE: Final = "added_tokens.json"
_EXTRA_KEY: Final = "extra_special_tokens"
_OLDER_EXTRA_KEY: Final = "additional_special_tokens"
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True, slots=True)
class DeclaredToken:
    """A token that the tokenizer has to have. `index` is None where no file numbers it."""

    content: str
    index: int | None = None
    is_special: bool = True
    flags: Mapping[str, bool] | None = None
    """`lstrip`, `normalized` and the like, as far as they are declared."""
    file_name: str = CONFIG_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token`, … to their text, as far as the model names them."""
    declared: tuple[DeclaredToken, ...]
    """By their numbers, then those without."""
    config: Fields
    """`tokenizer_config.json`, empty where there is none."""


def read_tokenizer_settings(model_dir: Path) -> TokenizerSettings:
    """Read the files beside `tokenizer.json`; one that doesn't exist sets nothing.

    Raises:
        UnsupportedModelError: a file can't be read, or a field in it has the wrong type.
    """
    config = _read(model_dir, CONFIG_FILE)
    is_older = "added_tokens_decoder" not in config
    older = _read(model_dir, _MAP_FILE) if is_older else {}
    by_name, extra = _extra(config, older)
    named = _special_tokens({**config, **older, **by_name})
    added = list(_decoder_entries(config))
    if is_older:
        specials = {token.content for token in (*named.values(), *extra)}
        added = list(_older_entries(_read(model_dir, _ADDED_FILE), specials))
    known = {token.content: token for token in added}
    special = {key: known.get(token.content, token) for key, token in named.items()}
    contents = {token.content for token in special.values()}
    added = [replace(token, is_special=token.is_special or token.content in contents) for token in added]
    unnumbered = {token.content: token for token in (*special.values(), *extra) if token.content not in known}
    return TokenizerSettings(
        special_tokens={key: token.content for key, token in special.items()},
        declared=(*sorted(added, key=lambda token: token.index or 0), *unnumbered.values()),
        config=config,
    )


def with_end_token(ends: tuple[int, ...], model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """`ends` and the id of the tokenizer's own `eos_token`, where it names one that the model has.

    Raises:
        UnsupportedModelError: a file can't be read, or a field in it has the wrong type.
    """
    index = _end_token_id(model_dir)
    return ends if index is None or index >= vocab_size or index in ends else (*ends, index)


def _end_token_id(model_dir: Path) -> int | None:
    settings = read_tokenizer_settings(model_dir)
    content = settings.special_tokens.get("eos_token")
    path = model_dir / TOKENIZER_FILE
    if content is None or not path.is_file():
        return None
    try:
        found = _id_in(path.read_bytes(), content)
    except (OSError, msgspec.MsgspecError) as error:
        raise UnsupportedModelError(f"{TOKENIZER_FILE} can't be read: {error}") from error
    if found is not None:
        return found
    return next((token.index for token in settings.declared if token.content == content), None)


class _Added(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_Added] = []


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] | None = None


class _Vocabulary(msgspec.Struct):
    model: _Model


def _id_in(tokenizer: bytes, content: str) -> int | None:
    """The id of a token in the text of a `tokenizer.json`."""
    for added in msgspec.json.decode(tokenizer, type=_AddedTokens).added_tokens:
        if added.content == content:
            return added.id
    match msgspec.json.decode(tokenizer, type=_Vocabulary).model.vocab:
        case dict() as vocabulary:
            return vocabulary.get(content)
        case list() as pieces:
            return next((index for index, (piece, _) in enumerate(pieces) if piece == content), None)
        case _:
            return None


def _read(model_dir: Path, file_name: str) -> Fields:
    path = model_dir / file_name
    return read_json(path) if path.exists() else {}


def _decoder_entries(config: Fields) -> Iterator[DeclaredToken]:
    entries = config.get("added_tokens_decoder", {})
    if not isinstance(entries, dict):
        raise UnsupportedModelError(f"{CONFIG_FILE}: added_tokens_decoder must be an object, not {entries!r}")
    for index, entry in entries.items():
        token = _token(entry)
        if token is None or not index.isdecimal():
            raise UnsupportedModelError(f"{CONFIG_FILE}: added_tokens_decoder has {index!r}: {entry!r}, not a token")
        yield replace(token, index=int(index), is_special=bool(entry.get("special", False)))


def _older_entries(entries: Fields, specials: set[str]) -> Iterator[DeclaredToken]:
    for content, index in entries.items():
        if not isinstance(index, int) or isinstance(index, bool):
            raise UnsupportedModelError(f"{_ADDED_FILE}: the id of {content!r} must be a whole number, not {index!r}")
        is_special = content in specials
        yield DeclaredToken(content, index, is_special, {"normalized": not is_special}, _ADDED_FILE)


def _special_tokens(named: Fields) -> dict[str, DeclaredToken]:
    """Keys that end in `_token` name one, unless they are switches."""
    found = {key: _token(value) for key, value in named.items() if key.endswith("_token")}
    return {key: token for key, token in found.items() if token is not None}


def _extra(config: Fields, older: Fields) -> tuple[Fields, list[DeclaredToken]]:
    """More special tokens, by names of their own and without: of both keys the newer counts, and where the config has
    a list, no list under the older key of the map."""
    first = config.get(_EXTRA_KEY) or config.get(_OLDER_EXTRA_KEY)
    by_name, listed = (first, []) if isinstance(first, dict) else ({}, first if isinstance(first, list) else [])
    match older.get(_EXTRA_KEY):
        case dict() as more:
            by_name, listed = by_name | more, []
        case list() as more:
            listed = listed + more
    values = listed or older.get(_OLDER_EXTRA_KEY)
    tokens = (_token(value) for value in values) if isinstance(values, list) else ()
    return by_name, [token for token in tokens if token is not None]


def _token(value: Any) -> DeclaredToken | None:
    """A token is its text, or an object with `content`."""
    if isinstance(value, str):
        return DeclaredToken(value)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return None
    return DeclaredToken(value["content"], flags={name: bool(value[name]) for name in _FLAGS if name in value})
