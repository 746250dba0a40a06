"""The families that the own decoder runs, by `model_type`."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from stageline_runtime.model_facts.families import llama, mistral, mixtral, olmo2, qwen2, qwen2_moe, qwen3, qwen3_moe
from stageline_runtime.model_facts.hyperparameters import ModelConfig
from stageline_runtime.model_facts.layer import Layer
from stageline_runtime.model_facts.model_fields import Fields


@dataclass(frozen=True, slots=True)
class Family:
    read: Callable[[Fields], ModelConfig]
    """Reads a config.json; raises UnsupportedModelError for what can't be run exactly."""
    layer: Callable[[ModelConfig, int], Layer]
    """Describes a layer, counted from the model's first, of a config that `read` or a rank's part of it made."""


FAMILIES = MappingProxyType(
    {
        "llama": Family(llama.read, llama.layer),
        "mistral": Family(mistral.read, mistral.layer),
        "mixtral": Family(mixtral.read, mixtral.layer),
        "olmo2": Family(olmo2.read, olmo2.layer),
        "qwen2": Family(qwen2.read, qwen2.layer),
        "qwen2_moe": Family(qwen2_moe.read, qwen2_moe.layer),
        "qwen3": Family(qwen3.read, qwen3.layer),
        "qwen3_moe": Family(qwen3_moe.read, qwen3_moe.layer),
    }
)


def layer_of(config: ModelConfig, index: int) -> Layer:
    """A layer of a model that the own decoder runs."""
    return FAMILIES[config.architecture].layer(config, index)
