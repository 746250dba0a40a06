"""What a rank holds, and what ranks save and cost, is counted as it will be read, kept and waited for."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oracles.planning_models import small_llama
from oracles.tiny_models import write_tiny_llama
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.model_facts.rank_cut import rank_cut
from stageline_runtime.models.weights.stage_weights import stage_weight_bytes
from stageline_runtime.planning.cut import CutCosts, costs_of_ranks
from stageline_runtime.planning.devices import ComputeRate, Device, Hardware, Link
from stageline_runtime.planning.memory import CutMemory, LargestStep, StageRoom, weight_bytes
from stageline_runtime.planning.predict import Workload, ranks_that_do_not_pay

DEVICE = Device(
    name="d",
    memory_bytes=10**9,
    memory_bandwidth_bytes_per_second=1e9,
    flops_per_second=ComputeRate(float32=1e30, bfloat16=1e30),
    step_overhead_seconds=0.0,
)
HARDWARE = Hardware(devices=(DEVICE,), link=Link(bandwidth_bytes_per_second=1e30, latency_seconds=0.0))
WORKLOAD = Workload(dtype="float32", max_model_len=64, num_sequences=4, context_tokens=10, max_step_tokens=8, ranks=2)


@pytest.mark.parametrize(("is_first", "is_last"), [(True, False), (False, False), (False, True)])
def test_a_ranks_weights_weigh_what_it_reads(is_first: bool, is_last: bool, tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path, tie_word_embeddings=False)
    config, layers = read_model_config(model_dir), LayerRange(first=1, last=2)
    read = stage_weight_bytes(
        model_dir,
        config,
        layers,
        has_embedding=is_first,
        has_head=is_last,
        dtype=torch.float32,
        cut=rank_cut(config, 0, 2),
    )
    assert read == weight_bytes(config, layers, is_first=is_first, is_last=is_last, element_bytes=4, ranks=2)


@pytest.mark.parametrize(("is_device", "in_room"), [(True, 1), (False, 2)])
def test_ranks_share_a_host_but_no_device(is_device: bool, in_room: int) -> None:
    memory = CutMemory(
        config=small_llama(3),
        rooms=(StageRoom(host="a", available_bytes=10**9, is_device=is_device),),
        max_model_len=64,
        largest_step=LargestStep(tokens=8, rows=4),
        element_bytes=4,
    )
    ranked = replace(memory, ranks=2)
    assert 2 * ranked.token_bytes(0, 3) == memory.token_bytes(0, 3)
    assert ranked.weight_bytes(0, 3) < memory.weight_bytes(0, 3)
    assert ranked.needed_in_room(0, 3) == in_room * ranked.needed_bytes(0, 3)


def test_costs_are_divided_and_two_sums_a_layer_are_added() -> None:
    costs = CutCosts(layer=8.0, embedding=1.0, head=6.0)
    assert costs_of_ranks(costs, 2, 0.5) == CutCosts(layer=5.0, embedding=1.0, head=3.0)
    assert costs_of_ranks(costs, 1, 0.5) == costs


def test_ranks_that_cost_more_than_they_save_are_told() -> None:
    config, cut = small_llama(3), (LayerRange(first=0, last=2),)
    assert ranks_that_do_not_pay(config, cut, HARDWARE, WORKLOAD) is None
    assert ranks_that_do_not_pay(config, cut, HARDWARE, replace(WORKLOAD, ranks=1, all_reduce_seconds=1.0)) is None
    sentence = ranks_that_do_not_pay(config, cut, HARDWARE, replace(WORKLOAD, all_reduce_seconds=0.01))
    assert sentence is not None
    assert sentence.startswith("2 ranks a stage do not pay: the slowest stage's step of 4 rows takes 6")
    assert "sums over the ranks take up to 60.00 ms of it" in sentence
