"""Text to token ids and back, with the model's `tokenizer.json`, to the same ids as transformers.

Two kinds of text come in: raw text gets the special tokens that the post-processor of `tokenizer.json` puts at its
edges (beginning of sequence), and text from a chat template gets none, because the template has written them. Encoding
never truncates or pads.

Of the settings beside it (`tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`,
`chat_template.json`) special tokens and chat template are read, with the precedence of transformers: a template in a
file of its own wins. `add_bos_token` is not read: next to a `tokenizer.json` transformers ignores it too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from stageline_api.engine_http import ErrorCode
from stageline_api.failures import FailureClass
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.text.token_bytes import TokenBytes
from stageline_runtime.termination import RuntimeFailure

DEFAULT_TEMPLATE_NAME = "default"


class EngineTokenizer:
    """A loaded tokenizer. Encoding long text lets other threads run, so it may go to a worker thread."""

    def __init__(self, backend: Tokenizer) -> None:
        """Wrap `backend`; its truncation and padding, which belong to training, are switched off."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        """Ids that never show in text (control tokens)."""
        self.token_bytes = TokenBytes(backend)

    @classmethod
    def load(cls, model_dir: Path) -> "EngineTokenizer":
        """Load `tokenizer.json` of the model in `model_dir`.

        Raises:
            RuntimeFailure: class ModelLoad; the file is missing or isn't a tokenizer.
        """
        path = model_dir / "tokenizer.json"
        if not path.exists():
            raise _broken(f"{path.name} is missing; only models with a fast tokenizer can be served")
        try:
            backend = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise _broken(f"{path.name} is not a tokenizer: {error}") from error
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows; the model's embedding may hold more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """The id of each token, added ones included."""
        return self._backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> tuple[int, ...]:
        """Token ids of `text`; `add_special_tokens` lets the post-processor add its own.

        `param` names the field that the text came from, for errors.

        Raises:
            PromptError: the text isn't valid Unicode (a lone surrogate).
        """
        check_unicode(text, param)
        # The batch call skips the offsets of every token, which takes less than half the time on long text.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids without a token give nothing, nor do special tokens unless asked for."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, index: int) -> str:
        """A token as the vocabulary writes it; empty for an id without a token."""
        return self._backend.id_to_token(index) or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Settings next to `tokenizer.json`."""

    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token`, … to their text, as far as the model names them."""
    chat_template: str | None
    """Jinja source, or None when the model has none."""


def read_tokenizer_config(model_dir: Path) -> TokenizerConfig:
    """Read the settings of the model in `model_dir`; a file that doesn't exist sets nothing.

    Raises:
        RuntimeFailure: class ModelLoad; a file can't be read, or a field in it has the wrong type.
    """
    config = _read_object(model_dir / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_object(model_dir / "special_tokens_map.json")) | _special_tokens(config)
    return TokenizerConfig(special_tokens=special_tokens, chat_template=_find_chat_template(model_dir, config))


def _find_chat_template(model_dir: Path, config: dict[str, Any]) -> str | None:
    source_file = model_dir / "chat_template.jinja"
    if source_file.exists():
        return _read_text(source_file)
    if config.get("chat_template") is not None:
        return _default_template(config["chat_template"], "tokenizer_config.json")
    value = _read_object(model_dir / "chat_template.json").get("chat_template")
    return None if value is None else _default_template(value, "chat_template.json")


def _default_template(value: object, file_name: str) -> str | None:
    """A template is a string, or a list of named ones of which `default` is for plain chat."""
    match value:
        case str():
            return value
        case list():
            named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
            if isinstance(template := named.get(DEFAULT_TEMPLATE_NAME), str):
                return template
            raise _broken_settings(
                f"{file_name}: chat_template names {sorted(map(str, named))}, none of them 'default'"
            )
        case _:
            raise _broken_settings(f"{file_name}: chat_template must be a string or a list, not {type(value).__name__}")


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """A token is given as its text or as an object with `content`; other `…_token` keys are switches."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        parsed = json.loads(_read_text(path))
    except ValueError as error:
        raise _broken_settings(f"{path.name} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise _broken_settings(f"{path.name} must hold a JSON object, not {type(parsed).__name__}")
    return parsed


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _broken_settings(f"{path.name} can't be read: {error}") from error


def check_unicode(text: str, param: str) -> None:
    """Refuse text that UTF-8 can't carry.

    Raises:
        PromptError: naming the character and its place.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        character = f"U+{ord(text[error.start]):04X}"
        message = f"The text is not valid Unicode: lone surrogate {character} at character {error.start}."
        raise PromptError(ErrorCode.INVALID_VALUE, message, param=param) from error


def _broken(detail: str, operation: str = "load tokenizer") -> RuntimeFailure:
    return RuntimeFailure(FailureClass.MODEL_LOAD, detail, operation=operation)


def _broken_settings(detail: str) -> RuntimeFailure:
    return _broken(detail, "read tokenizer settings")
