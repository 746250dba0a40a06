"""Models for measurements of ranks: random weights of sizes that divide by two, written once into a cache folder.

The dense one is SmolLM2-135M with 8 query and 4 KV heads instead of 9 and 3. In the mixture nine tenths of the bytes
are experts, of which 16 rows read nearly all.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stageline_bench.random_weights import WEIGHTS, write_random_weights

Fields = Mapping[str, Any]
_COMMON: Final = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "dtype": "bfloat16",
}
DENSE: Final = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
MIXTURE: Final = _COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}
_TRIAL: Final = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}


def trial(fields: Fields) -> Fields:
    """The same kind of model, tiny; its speed is meaningless."""
    return {**fields, **_TRIAL}


def rank_model(name: str, fields: Fields, cache_dir: Path) -> Path:
    """The directory of the model, which is written if missing."""
    directory = cache_dir / name
    if not (directory / WEIGHTS).exists():
        import torch

        unfinished = cache_dir / f"{name}.unfinished"
        write_random_weights(unfinished, fields, torch.device("cpu"))
        unfinished.replace(directory)
    return directory.resolve()
