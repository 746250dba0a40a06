"""Which safetensors files hold a model's weights, in the order of transformers: the single file, then the index.

An index often outlives its shards beside a new single file, so it is not believed where that is there. Pure.
"""

import json
from pathlib import Path
from typing import Final

from stageline_runtime.model_facts.model_fields import UnsupportedModelError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


def read_weight_map(model_dir: Path) -> dict[str, str] | None:
    """The file of each tensor, after the index; None where there is none, or the single file holds the model.

    Raises:
        UnsupportedModelError: the index can't be read.
    """
    index = model_dir / INDEX_FILE
    if (model_dir / SINGLE_FILE).exists() or not index.is_file():
        return None
    try:
        fields = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{index} can't be read: {error}") from error
    match fields:
        case {"weight_map": dict() as weight_map}:
            return {str(name): str(file) for name, file in weight_map.items()}
        case _:
            raise UnsupportedModelError(f"{index} is no safetensors index: weight_map must be an object")


def weight_file_names(model_dir: Path) -> list[str]:
    """Names of the model's weight files, whether they are here or not.

    Raises:
        UnsupportedModelError: the index can't be read.
    """
    weight_map = read_weight_map(model_dir)
    return [SINGLE_FILE] if weight_map is None else sorted(set(weight_map.values()))
