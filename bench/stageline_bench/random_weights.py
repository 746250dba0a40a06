"""Models with random weights, written on the machine that measures: no download, and any size is possible.

Their output is meaningless, but their speed does not depend on that.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import read_model_config

if TYPE_CHECKING:
    import torch

WEIGHTS: Final = "model.safetensors"


def write_random_weights(directory: Path, fields: Mapping[str, Any], device: "torch.device") -> Path:
    """`config.json` with these fields and `model.safetensors` in their `dtype`, drawn from a fixed seed on `device`."""
    # torch takes seconds to import; `--help` does not need it.
    import torch
    from safetensors.torch import save_file

    from stageline_runtime.models.weights.stage_weights import stage_tensors

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(fields)), encoding="utf-8")
    config = read_model_config(directory)
    layers = LayerRange(first=0, last=config.num_layers - 1)
    generator = torch.Generator(device).manual_seed(0)
    dtype: torch.dtype = getattr(torch, config.dtype)
    tensors = {}
    for name, tensor in stage_tensors(config, layers, has_embedding=True, has_head=True).items():
        # Matrix weights keep the size of their inputs; weights of norms are around 1.
        drawn = torch.randn(tensor.shape, generator=generator, device=device)
        drawn = drawn / tensor.shape[-1] ** 0.5 if len(tensor.shape) > 1 else 1 + drawn / 10
        tensors[name] = drawn.to(dtype).cpu().contiguous()
    save_file(tensors, str(directory / WEIGHTS), metadata={"format": "pt"})
    return directory
