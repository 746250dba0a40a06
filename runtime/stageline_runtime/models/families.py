"""Which code runs a model: the own decoder for its families, Hugging Face's layers (on the CPU alone) for all others.

A module of its own, above `decoder` and `coverage`, because the choice needs both. Whatever loads a stage chooses here:
`stage.load_stage`, the bench's check of a GPU's parts, the tests' pipelines in one process.

What a stage doesn't need is not imported: transformers on a stage of the own decoder, Triton on a CPU stage.
"""

from collections.abc import Callable
from pathlib import Path

from stageline_api.failures import FailureClass
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.model_facts.rank_cut import part_of_layers
from stageline_runtime.models.decoder import DecoderStage, attention_heads, build_stage_model
from stageline_runtime.models.layers.attention import Attention, AttentionHeads
from stageline_runtime.models.protocol import LoadProgress, ModelBuilder, StageModel, StageShape
from stageline_runtime.ranks.protocol import RankGroup
from stageline_runtime.ranks.stage_ranks import StageRanks
from stageline_runtime.termination import RuntimeFailure


def build_any_stage_model(
    model_dir: Path,
    config: ModelConfig,
    shape: StageShape,
    progress: LoadProgress,
    ranks: RankGroup | None = None,
    *,
    experts: RankGroup | None = None,
) -> StageModel:
    """Load what a stage, or one of its `ranks`, holds of any supported model and reserve its KV cache. `experts`: the
    ranks over which experts alone are cut; only one of the two may be several.

    Raises:
        UnsupportedModelError: the model can't be cut over so many ranks, or both are several.
        WeightsError: a tensor is missing or misshapen, a file is unreadable, or the model can't be run exactly.
    """
    if config.is_covered:
        StageRanks.of(ranks, experts).cut(config)  # refuses several ranks
        from stageline_runtime.models.coverage.stage import build_covered_stage  # only covered models need transformers

        return build_covered_stage(model_dir, config, shape, progress)
    return build_stage_model(model_dir, config, shape, progress, ranks, experts=experts)


def device_builder(
    accelerator: Accelerator,
    attention: Callable[[AttentionHeads], Attention] | None = None,
    ranks: RankGroup | None = None,
    *,
    experts: RankGroup | None = None,
    has_row_kernels: bool | None = None,
) -> ModelBuilder:
    """A builder for `accelerator`, of the part of a rank where there are `ranks`; `attention` None takes the Triton
    kernels. `experts`: the ranks that the experts alone are cut over. `has_row_kernels`: whether Triton's kernels on
    rows run too; None means where `attention` is None.

    The builder raises RuntimeFailure of class BadConfig for a model that only Hugging Face's layers can run: these
    run on the CPU alone.
    """

    def build(model_dir: Path, config: ModelConfig, shape: StageShape, progress: LoadProgress) -> DecoderStage:
        if config.is_covered:
            detail = (
                f"model_type {config.architecture} runs through Hugging Face's layers, and these on the CPU only; "
                "set spec.engine.device to cpu"
            )
            raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="load")
        part = part_of_layers(config, 1 if ranks is None else ranks.size)
        chosen = None if attention is None else attention(attention_heads(part))
        return build_stage_model(
            model_dir,
            config,
            shape,
            progress,
            ranks,
            experts=experts,
            accelerator=accelerator,
            attention=chosen,
            has_row_kernels=has_row_kernels,
        )

    return build
