"""Mistral: a Llama without biases, whose layers all share one window."""

from stageline_runtime.model_facts.families import llama
from stageline_runtime.model_facts.families.reading import read_decoder, read_window
from stageline_runtime.model_facts.hyperparameters import ModelConfig
from stageline_runtime.model_facts.model_fields import Fields, positive

layer = llama.layer


def read(fields: Fields) -> ModelConfig:
    windows = (read_window(fields, 4096),) * positive(fields, "num_hidden_layers")
    return read_decoder(fields, windows=windows, default_kv_heads=8, default_eos=2)
