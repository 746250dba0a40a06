"""Whatever a config.json holds in a field, reading it gives a config or one sentence that names the problem."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.model_facts.model_config import ModelConfig, UnsupportedModelError, model_config_from_dict

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
MIXTURE = {"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 32}
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3_moe", "granite")
FIELDS = (
    *COMMON,
    *MIXTURE,
    "shared_expert_intermediate_size",
    "qkv_bias",
    "model_type",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "mlp_only_layers",
    "decoder_sparse_step",
    "quantization_config",
    "partial_rotary_factor",
    "eos_token_id",
    "dtype",
    "hidden_act",
)
SCALARS = st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.sampled_from(["", "x", "default", "llama3"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "type", "factor"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.parametrize(
    "family",
    [one if one in ("llama", "qwen3_moe") else pytest.param(one, marks=pytest.mark.soak) for one in FAMILIES],
)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=2))
def test_no_value_is_a_traceback(family: str, changes: dict[str, Any]) -> None:
    try:
        config = model_config_from_dict({"model_type": family, **COMMON, **MIXTURE, **changes}, {})
    except UnsupportedModelError:
        return
    assert isinstance(config, ModelConfig)
    sizes = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size)
    assert all(isinstance(size, int) and size > 0 for size in sizes), sizes
    assert len(config.attention_windows) == config.num_layers
    assert all(isinstance(token, int) for token in config.eos_token_ids)
