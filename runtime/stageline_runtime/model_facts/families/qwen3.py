"""Qwen3: a Llama that normalises each head of queries and keys, with windows in some layers."""

from dataclasses import replace

from stageline_runtime.model_facts.families import llama, qwen2
from stageline_runtime.model_facts.families.reading import read_decoder
from stageline_runtime.model_facts.hyperparameters import ModelConfig
from stageline_runtime.model_facts.layer import Layer, Norm
from stageline_runtime.model_facts.model_fields import Fields


def read(fields: Fields) -> ModelConfig:
    has_bias = bool(fields.get("attention_bias", False))
    return read_decoder(
        fields,
        attention_bias=has_bias,
        output_bias=has_bias,
        windows=qwen2.read_windows(fields, qwen2.from_layer),
        default_kv_heads=32,
        default_head_dim=128,
    )


def layer(config: ModelConfig, index: int) -> Layer:
    norms = (Norm("self_attn.q_norm", config.head_dim), Norm("self_attn.k_norm", config.head_dim))
    return replace(llama.layer(config, index), query_key_norms=norms)
