"""Cuts a tiny model's one weight file into shards with an index, as large models are published."""

import json
import re
from pathlib import Path

from safetensors.torch import load_file, save_file

SHARDS = tuple(f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3))
"""Of four layers: embedding and layer 0; layers 1 and 2, which a cut in the middle separates; layer 3 and the tail."""


def shard_four_layers(directory: Path) -> Path:
    """Replace the `model.safetensors` of a model of four layers by `SHARDS`; returns `directory`."""
    tensors = load_file(directory / "model.safetensors")
    weight_map = {name: SHARDS[_shard_of(name)] for name in tensors}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, directory / shard)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model.safetensors").unlink()
    return directory


def _shard_of(name: str) -> int:
    layer = re.search(r"layers\.(\d+)\.", name)
    if layer is not None:
        return (int(layer[1]) + 1) // 2
    return 0 if "embed" in name else 2
