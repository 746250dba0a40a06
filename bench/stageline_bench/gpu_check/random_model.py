"""Sizes of the models with random weights that the check writes and runs."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stageline_bench.random_weights import write_random_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """The sizes of a Llama, or with experts of a Mixtral."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    dtype: str
    context_length: int = 2048
    num_experts: int = 0
    """Per layer; each token picks two."""


SMALL = RandomModel(
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    vocab_size=4096,
    dtype="float32",
)
SMALL_MIXTURE = replace(SMALL, num_experts=8, intermediate_size=128)
LARGE = RandomModel(
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=22,
    num_heads=32,
    num_kv_heads=4,
    vocab_size=32000,
    dtype="bfloat16",
)
"""The shape of TinyLlama-1.1B."""
LARGE_VOCABULARY = replace(LARGE, vocab_size=151_936)
"""The same with the vocabulary of Qwen."""


def write_random_model(directory: Path, model: RandomModel, device: torch.device) -> Path:
    """`config.json` and `model.safetensors`, drawn from a fixed seed on `device`."""
    mixture = {"model_type": "mixtral", "num_local_experts": model.num_experts, "num_experts_per_tok": 2}
    fields: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_length,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "dtype": model.dtype,
    } | (mixture if model.num_experts else {})
    return write_random_weights(directory, fields, device)


def write_words(directory: Path, vocab_size: int) -> None:
    """A tokenizer of `vocab_size` artificial words: a draft model must have the same vocabulary."""
    model = {
        "type": "WordLevel",
        "vocab": {f"w{index}": index for index in range(vocab_size)},
        "unk_token": "w0",
    }
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model} | dict.fromkeys(parts)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text("{}", encoding="utf-8")
