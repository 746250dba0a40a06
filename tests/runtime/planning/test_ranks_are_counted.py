"""What a rank holds, and what ranks save and cost, is counted as it will be read, kept and waited for."""

from dataclasses import replace

import pytest

from oracles.planning_models import small_llama, small_mixture, weight_bytes
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.model_facts.model_shapes import layer_size
from stageline_runtime.planning.cut import CutCosts, cut_layers, engine_costs, estimate_costs
from stageline_runtime.planning.devices import ComputeRate, Device, Hardware, Link, all_reduce_guess
from stageline_runtime.planning.memory import GroupMemory, LargestStep, StageRoom, draft_memory
from stageline_runtime.planning.predict import Workload, predict, ranks_that_do_not_pay, step_seconds

DEVICE = Device(
    name="d",
    memory_bytes=10**9,
    memory_bandwidth_bytes_per_second=1e9,
    flops_per_second=ComputeRate(float32=1e30, bfloat16=1e30),
    step_overhead_seconds=0.0,
)
HARDWARE = Hardware(devices=(DEVICE,), link=Link(bandwidth_bytes_per_second=1e30, latency_seconds=0.0))
LAYERS = LayerRange(first=0, last=3)
WORKLOAD = Workload(dtype="float32", max_model_len=64, num_sequences=4, context_tokens=10, max_step_tokens=8, ranks=2)


def test_of_ranks_that_share_layers_the_first_alone_holds_the_draft_model() -> None:
    memory = GroupMemory(
        config=small_llama(3),
        rooms=(StageRoom(host="a", available_bytes=10**9),),
        max_model_len=64,
        largest_step=LargestStep(tokens=8, rows=4),
        element_bytes=4,
        ranks=2,
    )
    drafting = replace(memory, draft=small_llama(2))
    draft = draft_memory(small_llama(2), memory.largest_step, 4)
    (plain,), (with_draft,) = (each.stages_by_count([3]) for each in (memory, drafting))
    assert with_draft.weight_bytes == plain.weight_bytes + draft.weight_bytes
    assert with_draft.step_bytes == max(plain.step_bytes, draft.step_bytes)
    assert with_draft.token_bytes == plain.token_bytes + draft.token_bytes


def test_the_engines_cut_counts_two_sums_a_layer_as_weights_that_could_be_read_meanwhile() -> None:
    config = small_llama(3)
    alone, shared = engine_costs(config), engine_costs(config, ranks=2)
    assert alone == estimate_costs(config)
    sums = 2 * all_reduce_guess(8 * config.hidden_size, on_devices=False) * 15e9 / 2
    assert shared.layer == pytest.approx(alone.layer / 2 + sums)
    assert (shared.embedding, shared.head) == (alone.embedding, alone.head / 2)
    assert engine_costs(config, ranks=2, on_devices=True).layer > shared.layer, "while devices read much more"


def test_the_engines_cut_counts_two_exchanges_in_each_layer_with_experts() -> None:
    config = small_mixture(4)
    exchanges = engine_costs(config, experts=2).layer - estimate_costs(config, 2).layer
    assert exchanges == pytest.approx(2 * all_reduce_guess(8 * 2048, on_devices=False) * 15e9 / 2)
    assert config.mixture is not None
    part = replace(config, mixture=replace(config.mixture, sparse_layers=(True, False, False, True)))
    assert engine_costs(part, experts=2).layer - estimate_costs(part, 2).layer == pytest.approx(exchanges / 2)
    assert engine_costs(config) == estimate_costs(config)


def test_sums_move_a_layer_towards_the_stage_with_the_head() -> None:
    """What sums add to layers they don't add to the head, which then weighs fewer layers."""
    config = replace(small_llama(3), num_layers=24, vocab_size=10 * 1024)

    def last(costs: CutCosts) -> int:
        cut = cut_layers(24, 2, layer_cost=costs.layer, embedding_cost=costs.embedding, head_cost=costs.head)
        return cut[1].count

    alone = estimate_costs(config)
    uncounted = replace(alone, layer=alone.layer / 2, head=alone.head / 2)
    assert last(engine_costs(config, ranks=2)) > last(uncounted)


def test_a_sequence_is_on_one_rank_of_those_that_share_experts() -> None:
    """Of a host's room its keys and values take what one rank needs; weights, and the smallest cache, what all do."""
    memory = GroupMemory(
        config=small_mixture(4),
        rooms=(StageRoom(host="a", available_bytes=10**12),),
        max_model_len=64,
        largest_step=LargestStep(tokens=8, rows=4),
        element_bytes=2,
        draft=small_llama(2),
    )
    ranked = replace(memory, experts=4)
    (alone,), (shared,) = (each.stages_by_count([4]) for each in (memory, ranked))
    assert (shared.num_ranks, shared.num_caches, shared.token_bytes) == (4, 4, alone.token_bytes)
    assert shared.needed_bytes(64) == shared.fixed_bytes + 4 * 64 * alone.token_bytes
    beside = draft_memory(small_llama(2), memory.largest_step, 2).weight_bytes
    of_rank = weight_bytes(memory.config, LAYERS, is_first=True, is_last=True, element_bytes=2, experts=4)
    assert shared.weight_bytes == 4 * (of_rank + beside) < 4 * alone.weight_bytes
    on_devices = replace(ranked, rooms=(StageRoom(host="a", available_bytes=10**12, is_device=True),))
    (on_device,) = on_devices.stages_by_count([4])
    assert 4 * on_device.fixed_bytes == shared.fixed_bytes
    assert on_device.needed_bytes(64) == on_device.fixed_bytes + 64 * alone.token_bytes


def test_a_layer_costs_each_of_its_ranks_its_part_of_the_experts() -> None:
    config = small_mixture(4)
    alone, shared, most = (estimate_costs(config, experts) for experts in (1, 2, 128))
    assert (shared.embedding, shared.head) == (alone.embedding, alone.head)
    of_experts = 2 * (alone.layer - shared.layer)
    assert most.layer == pytest.approx(alone.layer - of_experts * 127 / 128)
    attention = 2 * 2048 * (32 + 4) * 128
    assert alone.layer - of_experts == pytest.approx(attention + 128 * 2048), "attention and router are whole"
    assert estimate_costs(small_llama(3), 2) == estimate_costs(small_llama(3))


def test_a_rank_reads_its_experts_and_exchanges_rows_in_layers_that_have_some() -> None:
    config, layers = small_mixture(4), LayerRange(first=0, last=3)
    alone = Workload(dtype="bfloat16", max_model_len=64, num_sequences=8, context_tokens=10, max_step_tokens=8)

    def seconds(model: ModelConfig, workload: Workload) -> float:
        return step_seconds(model, layers, DEVICE, workload, 8, is_first=False, is_last=False)

    shared = replace(alone, experts=2)
    read = 128 * 3 * 2048 * 768 * (1 - (1 - 8 / 128) ** 8)
    assert layer_size(config, 0).read_experts(8) == pytest.approx(read)
    rows = 4 * 10 * config.kv_bytes_per_token(4, 2) / 1e9  # that a rank no longer reads, of 8 it has 4
    assert seconds(config, alone) - seconds(config, shared) == pytest.approx(4 * 2 * read / 2 / 1e9 + rows, rel=1e-6)
    slow = replace(shared, all_reduce_seconds=0.5)
    assert seconds(config, slow) - seconds(config, shared) == pytest.approx(4 * 2 * 0.5)
    assert config.mixture is not None
    part = replace(config, mixture=replace(config.mixture, sparse_layers=(True, False, False, True)))
    assert seconds(part, slow) - seconds(part, shared) == pytest.approx(2 * 2 * 0.5)


def test_operations_of_own_rows_and_of_all_rows_for_own_experts() -> None:
    config, layers = small_mixture(4), LayerRange(first=1, last=1)
    counting = replace(
        DEVICE, memory_bandwidth_bytes_per_second=1e30, flops_per_second=ComputeRate(float32=1e9, bfloat16=1e9)
    )
    shared = Workload(
        dtype="bfloat16", max_model_len=64, num_sequences=8, context_tokens=10, max_step_tokens=8, experts=4
    )
    own, picked = 2 * 2048 * (32 + 4) * 128 + 128 * 2048, 8 * 3 * 2048 * 768
    attention = 4 * 10 * 32 * 128
    expected = 2 * (2 * own + 8 * picked / 4) + 2 * attention
    found = step_seconds(config, layers, counting, shared, 8, is_first=False, is_last=False)
    assert found == pytest.approx(expected / 1e9, rel=1e-9)


def test_ranks_of_experts_on_devices_hold_fewer_weights_and_tokens_of_their_own() -> None:
    """Two devices have room for twice what one has beside the weights, of which each has fewer."""
    config, cut = small_mixture(2), (LayerRange(first=0, last=1),)
    device = replace(DEVICE, memory_bytes=20 * 10**9)
    hardware = replace(HARDWARE, devices=(device,))
    alone = Workload(dtype="bfloat16", max_model_len=64, num_sequences=8, context_tokens=10, on_devices=True)
    (one,) = predict(config, cut, hardware, alone).stages
    (each,) = predict(config, cut, hardware, replace(alone, experts=2)).stages
    freed = (one.weight_bytes - each.weight_bytes) // config.kv_bytes_per_token(2, 2)
    assert freed > 0
    # The largest step takes more of each, whose experts see the rows of both.
    assert 2 * one.kv_capacity_tokens < each.kv_capacity_tokens <= 2 * (one.kv_capacity_tokens + freed)
    waiting = replace(alone, num_sequences=10**6)
    alone_at_once = predict(config, cut, hardware, waiting).admitted_sequences
    assert predict(config, cut, hardware, replace(waiting, experts=2)).admitted_sequences >= 2 * alone_at_once
    too_small = replace(hardware, devices=(replace(device, memory_bytes=10**9),))
    refused = predict(config, cut, too_small, replace(alone, experts=2))
    assert (refused.admitted_sequences, refused.tokens_per_second) == (0, None)


def test_ranks_that_cost_more_than_they_save_are_told() -> None:
    config, cut = small_llama(3), (LayerRange(first=0, last=2),)
    assert ranks_that_do_not_pay(config, cut, HARDWARE, WORKLOAD) is None
    assert ranks_that_do_not_pay(config, cut, HARDWARE, replace(WORKLOAD, ranks=1, all_reduce_seconds=1.0)) is None
    sentence = ranks_that_do_not_pay(config, cut, HARDWARE, replace(WORKLOAD, all_reduce_seconds=0.01))
    assert sentence is not None
    assert sentence.startswith("2 ranks a stage do not pay: the slowest stage's step of 4 rows takes 6")
    assert "sums over the ranks take up to 60.00 ms of it" in sentence
