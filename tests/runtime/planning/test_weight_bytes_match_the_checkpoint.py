"""What planning takes a stage's weights for is what the stage will read, tensor by tensor."""

import pytest

from oracles.planning_models import small_llama
from stageline_api.runtime_config import LayerRange
from stageline_runtime.models.weights.stage_weights import CheckpointForm, head_name, stage_tensors
from stageline_runtime.planning.memory import weight_bytes

VARIANTS = {
    "llama": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize(("is_first", "is_last"), [(False, False), (True, False), (False, True), (True, True)])
def test_weight_bytes_are_those_of_the_tensors(changes: dict[str, object], is_first: bool, is_last: bool) -> None:
    config = small_llama(6, **changes)
    layers = LayerRange(first=1, last=3)
    tensors = stage_tensors(config, layers, has_embedding=is_first, has_head=is_last)
    elements = sum(tensor.num_elements for tensor in tensors.values())
    if is_first and is_last and config.tie_word_embeddings:
        # One tensor in the file, held twice: dense for look-ups and packed for the head.
        elements += tensors[head_name(config, CheckpointForm())].num_elements
    assert weight_bytes(config, layers, is_first=is_first, is_last=is_last, element_bytes=2) == 2 * elements
