"""Checks the LoRA adapters of the spec in their directories before vLLM is started.

vLLM reads them last, once the model is loaded and warmed up on all stages, and an invalid one ends the group then.
So this module checks `adapter_config.json` early: that it exists, and that its rank is within vLLM's limit. vLLM
itself reports the rest: an adapter for another model, or a kind that vLLM doesn't know (`outcome`).
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from stageline_api.failures import FailureClass
from stageline_api.runtime_config import LoraAdapter
from stageline_runtime.termination import RuntimeFailure

CONFIG_NAME: Final = "adapter_config.json"
RANK_ARGUMENT: Final = "--max-lora-rank"
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM takes as the greatest one."""
DEFAULT_MAX_RANK: Final = 16
_SHORTEST: Final = "--max-lora-r"
"""Less could be `--max-loras` and `--max-lora-cls-labels` too."""


def check_adapters(adapters: Iterable[LoraAdapter], extra_args: Sequence[str]) -> None:
    """Check that vLLM can load them, as far as their configs show.

    Raises:
        RuntimeFailure: class BadConfig, naming the adapter, its path and the problem.
    """
    limit = max_rank(extra_args)
    for index, adapter in enumerate(adapters):
        problem = _problem(Path(adapter.path), limit)
        if problem:
            detail = f"spec.engine.loraAdapters[{index}] ({adapter.name}, {adapter.path}): {problem}"
            raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="check the LoRA adapters")


def max_rank(extra_args: Sequence[str]) -> int | None:
    """The highest rank that vLLM's arguments allow; None where the argument is not a number."""
    given: str = str(DEFAULT_MAX_RANK)
    for index, word in enumerate(extra_args):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if RANK_ARGUMENT.startswith(name) and name.startswith(_SHORTEST):
            given = value if equals else "".join(extra_args[index + 1 : index + 2])
    return int(given) if given.isascii() and given.isdigit() else None


def _problem(directory: Path, limit: int | None) -> str:
    try:
        config = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
    except OSError as error:
        return f"{CONFIG_NAME} can't be read: {error.strerror}; the path is one on a volume of spec.template.volumes"
    except ValueError as error:
        return f"{CONFIG_NAME} is no JSON: {error}"
    if not isinstance(config, dict):
        return f"{CONFIG_NAME} is no JSON object"
    ranks = _ranks(config)
    wrong = [rank for rank in ranks if type(rank) is not int or rank < 1]
    if wrong:
        return f"{CONFIG_NAME} has the rank {json.dumps(wrong[0])[:80]}, not a positive integer"
    if limit is not None and max(ranks) > limit:
        return f"its rank is {max(ranks)}, more than the {limit} of {RANK_ARGUMENT}: {_advice(max(ranks))}"
    return ""


def _ranks(config: dict[str, Any]) -> list[Any]:
    """That of all modules, and those of single ones."""
    of_modules = config.get("rank_pattern")
    return [config.get("r"), *(of_modules.values() if isinstance(of_modules, dict) else ())]


def _advice(rank: int) -> str:
    enough = next((each for each in RANKS if each >= rank), None)
    if enough is None:
        return f"vLLM takes none above {RANKS[-1]}"
    return f"add {RANK_ARGUMENT} {enough} to spec.engine.extraArgs"
