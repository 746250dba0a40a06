"""Checks for code that a checkpoint brings (`auto_map` of its configs) before vLLM is started with it.

vLLM has classes of its own for most checkpoints that bring code, and runs none of that code unless
`--trust-remote-code` is in `extraArgs`; if it needs the code, it reports that (`outcome`). With that argument vLLM
looks for the code in the model's directory, then at the Hub, which it may not access. `prepare` fetches no code. So
a directory without the code is refused.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from stageline_api.failures import FailureClass
from stageline_runtime.termination import RuntimeFailure

ARGUMENT: Final = "--trust-remote-code"
_SHORTEST: Final = "--trust-rem"
"""Less could be `--trust-request-…` too."""
_CONFIGS: Final = ("config.json", "tokenizer_config.json")
_ELSEWHERE: Final = "--"
"""Between the repository that has the code and the name in it."""


def check_model_code(model_dir: Path, extra_args: Iterable[str]) -> None:
    """Check that the model's directory has the code that vLLM's arguments allow it to run.

    Raises:
        RuntimeFailure: class BadConfig, naming the config and its missing code.
    """
    if not any(map(_is_argument, extra_args)):
        return
    for name in _CONFIGS:
        missing = sorted({code for code in _code_of(model_dir / name) if not _is_there(model_dir, code)})
        if missing:
            detail = (
                f"spec.engine.extraArgs has {ARGUMENT}, but {name} wants {', '.join(missing)}, which is not in "
                f"{model_dir}: no code is fetched, so give a file:// or pvc:// source that holds it, or leave the "
                "argument out where vLLM knows the model by itself"
            )
            raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="check the model's code")


def _is_argument(word: str) -> bool:
    """Accepts both spellings, and every abbreviation that vLLM accepts as this argument alone."""
    spelled = word.replace("_", "-")
    return ARGUMENT.startswith(spelled) and spelled.startswith(_SHORTEST)


def _code_of(config: Path) -> Iterator[str]:
    """Files, or `REPOSITORY--FILE`; none for a missing or unreadable config, which vLLM reports."""
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    wanted = fields.get("auto_map") if isinstance(fields, dict) else None
    if not isinstance(wanted, dict):
        return
    for value in wanted.values():
        yield from (_file_of(name) for name in _names(value))


def _names(value: Any) -> list[str]:
    """A tokenizer names two classes, one of which may be none."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]


def _file_of(name: str) -> str:
    """`module.Class` is in `module.py`."""
    return f"{name.rpartition('.')[0]}.py"


def _is_there(model_dir: Path, code: str) -> bool:
    return _ELSEWHERE not in code and (model_dir / code).is_file()
