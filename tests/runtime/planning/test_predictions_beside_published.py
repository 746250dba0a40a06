"""The table of docs/planning.md that stands beside published figures holds what the plan says. That reality is so is
not shown here: the published column is others' measurement.
"""

from typing import Final

import pytest

from oracles.planning_models import llama_70b_class
from processes.repository_files import ROOT
from stageline_runtime.model_facts.model_config import ModelConfig, model_config_from_dict
from stageline_runtime.planning.devices import hardware_from_preset
from stageline_runtime.planning.group_plan import plan_group
from stageline_runtime.planning.predict import Prediction, Workload

QWEN3_30B_A3B: Final = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


def predicted(model: ModelConfig, preset: str, stages: int, sequences: int, ranks: int = 1) -> Prediction:
    asked = Workload(
        dtype="bfloat16",
        max_model_len=4096,
        num_sequences=sequences,
        context_tokens=1024,
        on_devices=True,
        ranks=ranks,
        all_reduce_seconds=2e-5 if ranks > 1 else 0.0,
    )
    return plan_group(model, hardware_from_preset(preset, stages), asked, None).prediction


@pytest.mark.parametrize(
    ("row", "model", "preset", "stages", "sequences", "ranks"),
    [
        ("Qwen3-30B-A3B, 2 B200", QWEN3_30B_A3B, "b200-180gb", 2, 128, 1),
        ("Llama-70B, 8 H100, P = 8", None, "h100-80gb", 8, 256, 1),
        ("Llama-70B, 8 H100, P = 2, T = 4", None, "h100-80gb", 2, 256, 4),
    ],
)
def test_the_page_says_what_the_plan_says(
    row: str, model: dict[str, object] | None, preset: str, stages: int, sequences: int, ranks: int
) -> None:
    config = llama_70b_class() if model is None else model_config_from_dict(model, {})
    found = predicted(config, preset, stages, sequences, ranks)
    assert found.tokens_per_second is not None
    page = (ROOT / "docs" / "planning.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"|{row}|")]
    said = f"|{sequences}|{found.tokens_per_second:,.0f} tok/s, {found.round_seconds * 1e3:.1f} ms|"
    assert said in line, f"the page: {line}; the plan: {said}"


def test_a_mixtures_step_reads_every_expert_that_some_token_picks() -> None:
    """By hand: a stage of 25 layers, 64 rows of 8 picks out of 128 experts each, whose 64 x 8 draws miss an expert with
    a probability of (1 - 8/128) ** 64 = 1.6 %."""
    expert, picked = 3 * 2048 * 768, 128 * (1 - (1 - 8 / 128) ** 64)
    attention = 2048 * 128 * (32 + 4 + 4 + 32) + 2 * 128
    layer = attention + 2 * 2048 + 128 * 2048 + picked * expert
    read = 2 * (25 * layer + 64 * 2048) + 64 * 1024 * 25 * (2 * 4 * 128 * 2)
    first = predicted(model_config_from_dict(QWEN3_30B_A3B, {}), "b200-180gb", 2, 128).stages[0]
    assert first.layers.count == 25
    assert first.step_seconds == pytest.approx(read / 8e12 + 0.0005, rel=1e-6)
