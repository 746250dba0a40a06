"""The parts of a model's tokenizer settings that the engine needs: special tokens and chat template.

Reads `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja` and `chat_template.json` with the
precedence of transformers: a template in a file of its own wins over one in `tokenizer_config.json`. `add_bos_token`
is not read: next to a `tokenizer.json` transformers ignores it, and the file's post-processor decides.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageline_api.failures import FailureClass
from stageline_runtime.termination import RuntimeFailure

DEFAULT_TEMPLATE_NAME = "default"


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
    return TokenizerConfig(
        special_tokens=special_tokens,
        chat_template=_find_chat_template(model_dir, config),
    )


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
            raise _broken(f"{file_name}: chat_template names {sorted(map(str, named))}, none of them 'default'")
        case _:
            raise _broken(f"{file_name}: chat_template must be a string or a list, not {type(value).__name__}")


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
        raise _broken(f"{path.name} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise _broken(f"{path.name} must hold a JSON object, not {type(parsed).__name__}")
    return parsed


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(f"{path.name} can't be read: {error}") from error


def _broken(detail: str) -> RuntimeFailure:
    return RuntimeFailure(FailureClass.MODEL_LOAD, detail, operation="read tokenizer settings")
