"""In float32, a pipeline whose stages are cut over ranks says the greedy tokens of Hugging Face's `generate`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oracles.family_checks import MAX_TOKENS, PROMPTS, pipeline_tokens
from oracles.in_process_pipeline import InProcessPipeline, Request
from oracles.pipeline_checks import hugging_face_tokens
from oracles.planning_models import weight_bytes
from oracles.quantized_models import quantize_checkpoint
from oracles.simulated_accelerator import ImmediateAccelerator
from oracles.thread_ranks import ThreadRanks, build_ranks, builder_of_ranks
from oracles.tiny_models import (
    write_tiny_granite,
    write_tiny_llama,
    write_tiny_olmo2,
    write_tiny_qwen3,
    write_tiny_qwen3_moe,
)
from stageline_api.runtime_config import LayerRange
from stageline_runtime.model_facts.model_config import UnsupportedModelError, read_model_config
from stageline_runtime.model_facts.rank_cut import rank_cut
from stageline_runtime.models.decoder import DecoderStage
from stageline_runtime.models.families import device_builder
from stageline_runtime.models.layers.attention import PlainAttention
from stageline_runtime.models.protocol import ModelBuilder, StageShape
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS
from stageline_runtime.ranks.protocol import RankGroup


def _smollm_heads(path: Path) -> Path:
    return write_tiny_llama(path, num_heads=9, num_kv_heads=3, hidden_size=72, intermediate_size=192)


def _eight_heads(path: Path) -> Path:
    return write_tiny_qwen3(path, num_heads=8, num_kv_heads=4, tie_word_embeddings=False)


def _biases(path: Path) -> Path:
    """Every projection has a bias, those that are summed over ranks too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=269,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("write", "ranks"),
    [
        (write_tiny_llama, 2),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in ((write_tiny_qwen3, 2), (_eight_heads, 4), (_smollm_heads, 3), (_biases, 2))
        ),
    ],
)
def test_greedy_tokens_are_those_of_hugging_face(write: Callable[[Path], Path], ranks: int, tmp_path: Path) -> None:
    model_dir = write(tmp_path)
    expected = hugging_face_tokens(model_dir, PROMPTS, MAX_TOKENS)
    assert len({token for output in expected for token in output}) > 10, "the model says too little to tell anything"
    for stage_count in (1, 2):
        assert pipeline_tokens(model_dir, stage_count, builder_of_ranks(ranks)) == expected, f"P={stage_count}"


def _shape(*, num_layers: int, is_last: bool = True) -> StageShape:
    return StageShape(
        layers=LayerRange(first=0, last=num_layers - 1),
        is_first=True,
        is_last=is_last,
        dtype=torch.float32,
        num_cohorts=1,
        num_slots=2,
        slot_tokens=32,
    )


def _quiet(_loaded: int, _total: int) -> None:
    pass


def test_a_rank_reads_and_holds_only_its_part(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path, tie_word_embeddings=False)
    config = read_model_config(model_dir)
    read: list[tuple[int, int]] = []
    shape = _shape(num_layers=config.num_layers)
    stage = build_ranks(
        model_dir, config, shape, ThreadRanks(2).ranks[1:], lambda done, total: read.append((done, total))
    )
    norms = (2 * config.num_layers + 1) * config.hidden_size
    vocabulary = config.vocab_size * config.hidden_size
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim * config.hidden_size
    halves = config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size) // 2
    head = (config.vocab_size - (config.vocab_size + 1) // 2) * config.hidden_size
    expected = 4 * (norms + vocabulary + halves + head)
    assert read[-1] == (expected, expected)
    of_rank_0 = weight_bytes(config, shape.layers, is_first=True, is_last=True, element_bytes=4, ranks=2)
    assert of_rank_0 - expected == 4 * (config.vocab_size % 2) * config.hidden_size
    model = stage.models[0]
    assert isinstance(model, DecoderStage)
    keys, _ = model._layers._caches[0]
    assert keys.shape == (2 * 2 + 1, config.num_kv_heads // 2, BLOCK_TOKENS, config.head_dim)


def test_layers_are_summed_twice_by_names_that_say_which(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path, num_layers=2)
    config, shared = read_model_config(model_dir), ThreadRanks(2)
    stage = build_ranks(model_dir, config, _shape(num_layers=2), shared.ranks, _quiet)
    InProcessPipeline([stage], slots_per_cohort=1, chunk_tokens=8).generate([Request([5, 6, 7], 1)])
    assert shared.operations == [
        "all-reduce, layer 0, attention",
        "all-reduce, layer 0, feed-forward",
        "all-reduce, layer 1, attention",
        "all-reduce, layer 1, feed-forward",
        "all-gather, logits",
    ]


@pytest.mark.parametrize(
    ("sizes", "ranks", "said"),
    [
        ({"num_heads": 9, "num_kv_heads": 3, "hidden_size": 72}, 2, "9 query heads and 3 key and value heads"),
        ({}, 4, "2 key and value heads can't be divided among 4 ranks"),
        ({"intermediate_size": 129}, 2, "129 feed-forward columns can't be divided among 2 ranks"),
    ],
)
def test_what_does_not_divide_is_refused_with_both_numbers(
    sizes: dict[str, int], ranks: int, said: str, tmp_path: Path
) -> None:
    config = read_model_config(write_tiny_llama(tmp_path, **sizes))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=said) as refusal:
        rank_cut(config, 0, ranks)
    assert f"{ranks} ranks" in str(refusal.value)


def test_hidden_elements_have_to_divide_because_each_rank_sends_its_share(tmp_path: Path) -> None:
    config = replace(read_model_config(write_tiny_llama(tmp_path)), hidden_size=63)
    with pytest.raises(UnsupportedModelError, match="63 hidden elements can't be divided among 2 ranks"):
        rank_cut(config, 0, 2)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (write_tiny_qwen3_moe, "mixture of experts"),
        (write_tiny_olmo2, "all of what self_attn.q_norm.weight"),
        (write_tiny_granite, "Hugging Face's layers"),
    ],
)
def test_other_paths_refuse_ranks_in_a_sentence(write: Callable[[Path], Path], said: str, tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path))
    with pytest.raises(UnsupportedModelError, match=said):
        build_ranks(tmp_path, config, _shape(num_layers=config.num_layers), ThreadRanks(2).ranks, _quiet)


def test_quantised_matrices_are_cut_once_they_are_dense(tmp_path: Path) -> None:
    quantised, dense = write_tiny_llama(tmp_path / "quantised"), write_tiny_llama(tmp_path / "dense")
    save_file(quantize_checkpoint(quantised, "fp8 by block"), dense / "model.safetensors", metadata={"format": "pt"})
    expected = hugging_face_tokens(dense, PROMPTS, MAX_TOKENS)
    assert pipeline_tokens(quantised, 2, builder_of_ranks(2)) == expected


def test_ranks_on_devices_say_the_same(tmp_path: Path) -> None:
    model_dir = write_tiny_qwen3(tmp_path)

    def builder_of(ranks: RankGroup) -> ModelBuilder:
        return device_builder(ImmediateAccelerator(), PlainAttention, ranks)

    assert pipeline_tokens(model_dir, 2, builder_of_ranks(2, builder_of)) == pipeline_tokens(model_dir, 2)
