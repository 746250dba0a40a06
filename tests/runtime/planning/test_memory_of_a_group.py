"""What stages take of their rooms, to the byte: weights, the largest step, keys and values, and what is left."""

import pytest

from oracles.planning_models import small_llama, weight_bytes
from stageline_api.runtime_config import LayerRange
from stageline_runtime.planning.memory import GroupMemory, HostMemory, LargestStep, StageRoom, hosts_of

VOCABULARY, HIDDEN, INNER, QUERIES, KEYS = 1024, 64, 128, 4 * 16, 2 * 16
LAYER = HIDDEN * (2 * QUERIES + 2 * KEYS + 3 * INNER) + 2 * HIDDEN
HALF_LAYER = HIDDEN * (2 * QUERIES + 2 * KEYS + 3 * INNER) // 2 + 2 * HIDDEN
TOKEN_OF_LAYER = 2 * KEYS * 2
STEP = LargestStep(tokens=8, rows=4)
CUT = (LayerRange(first=0, last=0), LayerRange(first=1, last=2))


def memory(*, is_device: bool = False, ranks: int = 1, available_bytes: int = 0) -> GroupMemory:
    """Two stages in bfloat16, on one host or with a device each."""
    rooms = tuple(StageRoom(host=host, available_bytes=available_bytes, is_device=is_device) for host in "ab")
    return GroupMemory(
        config=small_llama(3, vocab_size=VOCABULARY),
        rooms=rooms if is_device else rooms[:1] * 2,
        max_model_len=16,
        largest_step=STEP,
        element_bytes=2,
        ranks=ranks,
    )


@pytest.mark.parametrize("in_room", [1, 2], ids=["a device each", "a host for both ranks"])
def test_weights_and_tokens_of_each_stage(in_room: int) -> None:
    alone = memory().stages_of(CUT)
    assert [stage.weight_bytes for stage in alone] == [
        2 * (VOCABULARY * HIDDEN + LAYER),
        2 * (2 * LAYER + HIDDEN + VOCABULARY * HIDDEN),
    ]
    assert [stage.token_bytes for stage in alone] == [TOKEN_OF_LAYER, 2 * TOKEN_OF_LAYER]
    shared = memory(is_device=in_room == 1, ranks=2).stages_of(CUT)
    assert [stage.weight_bytes for stage in shared] == [
        in_room * 2 * (VOCABULARY * HIDDEN + HALF_LAYER),
        in_room * 2 * (2 * HALF_LAYER + HIDDEN + VOCABULARY // 2 * HIDDEN),
    ]
    hidden, rows = 8 * HIDDEN // 2 * 2, 4 * 8
    rings = 4 * hidden + 8 * rows if in_room == 1 else 0
    steps = [STEP.bytes_of(memory().config, is_last=last, element_bytes=2, ranks=2) for last in (False, True)]
    assert [stage.step_bytes for stage in shared] == [in_room * (step + rings) for step in steps]
    assert [stage.token_bytes for stage in shared] == [in_room * TOKEN_OF_LAYER // 2, in_room * TOKEN_OF_LAYER]


def test_stages_of_a_host_share_what_is_left() -> None:
    """Of each token three layers' keys and values together; of the least that a stage saw, nine tenths."""
    stages = memory(available_bytes=2_000_000).stages_of(CUT)
    (host,) = hosts_of(stages)
    fixed = sum(stage.weight_bytes + stage.step_bytes for stage in stages)
    assert host.cache_tokens == (1_800_000 - fixed) // (3 * TOKEN_OF_LAYER)
    assert host.missing_bytes(16) == fixed + 16 * 3 * TOKEN_OF_LAYER - 1_800_000 < 0
    assert len(hosts_of(memory(is_device=True).stages_of(CUT))) == 2


def test_a_host_has_whole_layers_left_beside_the_ends() -> None:
    layer = 2 * LAYER + 16 * TOKEN_OF_LAYER
    ends = HostMemory(stages=memory().stages_by_count([0, 0])).missing_bytes(16)
    enough = -(-(ends + 3 * layer) * 10 // 9)
    assert [room.most_layers for room in memory(available_bytes=enough).host_rooms()] == [3]
    assert [room.most_layers for room in memory(available_bytes=enough - 10).host_rooms()] == [2]


def test_a_tied_matrix_is_counted_twice_on_a_lone_stage() -> None:
    """Dense for look-ups, and packed for the head."""
    config = small_llama(1, vocab_size=VOCABULARY, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    counted = weight_bytes(config, CUT[0], is_first=True, is_last=True, element_bytes=2)
    biases = QUERIES + 2 * KEYS + HIDDEN + 2 * INNER + HIDDEN
    assert counted == 2 * (LAYER + biases + HIDDEN + 2 * VOCABULARY * HIDDEN)
