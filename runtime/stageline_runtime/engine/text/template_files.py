"""The model's chat templates by name, from whichever files hold them, with the precedence of transformers.

Templates in files of their own (`chat_template.jinja`, `additional_chat_templates/`) stand for all; else
`tokenizer_config.json` has one, or a list of named ones, or `chat_template.json` does. `default` is for plain chat,
`tool_use` for chats with tools.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stageline_api.failures import FailureClass
from stageline_runtime.model_facts.model_fields import UnsupportedModelError, read_json
from stageline_runtime.model_facts.tokenizer_files import CONFIG_FILE, read_tokenizer_settings
from stageline_runtime.termination import RuntimeFailure

DEFAULT_TEMPLATE: Final = "default"
TOOL_TEMPLATE: Final = "tool_use"
_FILE: Final = "chat_template.jinja"
_FOLDER: Final = "additional_chat_templates"
_OLDER_FILE: Final = "chat_template.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Settings next to `tokenizer.json` that chats need."""

    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token`, … to their text, as far as the model names them."""
    chat_templates: Mapping[str, str]
    """Jinja source by name, empty when the model has none."""


def read_tokenizer_config(model_dir: Path) -> TokenizerConfig:
    """Read the settings of the model in `model_dir`; a file that doesn't exist sets nothing.

    Raises:
        RuntimeFailure: class ModelLoad; a file can't be read, or a field in it has the wrong type.
    """
    try:
        settings = read_tokenizer_settings(model_dir)
        templates = _from_files(model_dir) or _from_config(model_dir, settings.config)
    except UnsupportedModelError as error:
        raise RuntimeFailure(FailureClass.MODEL_LOAD, str(error), operation="read tokenizer settings") from error
    return TokenizerConfig(special_tokens=settings.special_tokens, chat_templates=templates)


def _from_files(model_dir: Path) -> dict[str, str]:
    named = {path.stem: path for path in sorted((model_dir / _FOLDER).glob("*.jinja"))}
    if (model_dir / _FILE).exists():
        named = {DEFAULT_TEMPLATE: model_dir / _FILE} | named
    return {name: _read_text(path) for name, path in named.items()}


def _from_config(model_dir: Path, config: dict[str, Any]) -> dict[str, str]:
    if config.get("chat_template") is not None:
        return _named(config["chat_template"], CONFIG_FILE)
    path = model_dir / _OLDER_FILE
    value = read_json(path).get("chat_template") if path.exists() else None
    return {} if value is None else _named(value, _OLDER_FILE)


def _named(value: object, file_name: str) -> dict[str, str]:
    match value:
        case str():
            return {DEFAULT_TEMPLATE: value}
        case list():
            return dict(_entry(entry, file_name) for entry in value)
        case dict():
            return dict(_entry({"name": name, "template": each}, file_name) for name, each in value.items())
        case _:
            kind = type(value).__name__
            raise UnsupportedModelError(f"{file_name}: chat_template must be a string or a list, not {kind}")


def _entry(entry: object, file_name: str) -> tuple[str, str]:
    match entry:
        case {"name": str(name), "template": str(template)}:
            return name, template
        case _:
            raise UnsupportedModelError(f"{file_name}: chat_template has {entry!r}, not a name with its template")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedModelError(f"{path.name} can't be read: {error}") from error
