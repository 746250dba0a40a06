"""Model configs for planning tests: no weights, only the numbers that a cut and a prediction depend on."""

from stageline_runtime.model_config import ModelConfig, model_config_from_dict


def small_llama(num_layers: int, **changes: object) -> ModelConfig:
    """A Llama small enough that its bytes can be checked by hand."""
    fields = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
    }
    return model_config_from_dict(fields | changes, {})


def llama_70b_class() -> ModelConfig:
    """The shape of the public 70B-class Llama models."""
    return small_llama(
        80,
        hidden_size=8192,
        intermediate_size=28_672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=131_072,
        dtype="bfloat16",
    )
