"""One decoder layer's weights: under which names checkpoints hold them, and how they are fused for the decoder.

Projections that share an input become one matrix: query, key and value; gate and up, also of every expert. Experts come
in three forms: stacked, as transformers 5 holds them; separate, as Qwen publishes them; and separate under Mixtral's
own names. The form changes names only, never values or bytes.
"""

from dataclasses import dataclass
from enum import Enum

import torch

from stageline_runtime.model_facts.model_config import MixtureConfig, ModelConfig
from stageline_runtime.model_facts.model_shapes import (
    EXPERT_DOWN_NAME,
    EXPERT_GATE_UP_NAME,
    ROUTER_NAME,
    SHARED_GATE_NAME,
    SHARED_NAME,
    Shapes,
    layer_tensor_shapes,
    mixture_of,
)


class ExpertForm(Enum):
    """How a checkpoint names a mixture's tensors; the value is a part of some name of each layer."""

    STACKED = f".{EXPERT_GATE_UP_NAME}"
    SEPARATE = ".mlp.experts.0."
    MIXTRAL = ".block_sparse_moe.experts.0."


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A matrix `[out_features, in_features]` and its bias `[out_features]`, if the model has one."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWeights:
    """A gated feed-forward block; `gate_up` stacks gate and up rows."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertWeights:
    """The expert that every token passes, and the gate that weights it: `[1, hidden_size]`."""

    block: DenseWeights
    gate: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """A mixture of gated feed-forward blocks without biases."""

    router: torch.Tensor
    """`[num_experts, hidden_size]`."""
    gate_up: tuple[torch.Tensor, ...]
    """By expert held: `[2 * intermediate_size, hidden_size]`, gate rows first."""
    down: tuple[torch.Tensor, ...]
    """By expert held: `[hidden_size, intermediate_size]`."""
    shared: SharedExpertWeights | None = None
    first: int = 0
    """Which of the router's experts is the first one held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. `qkv` stacks query, key and value rows."""

    input_norm: torch.Tensor
    qkv: Projection
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Projection
    feed_forward_norm: torch.Tensor
    feed_forward: DenseWeights | ExpertWeights


def layer_file_shapes(config: ModelConfig, layer: int, form: ExpertForm) -> Shapes:
    """Shapes of a layer's tensors by the names that a checkpoint of `form` has for them within the layer."""
    shapes = layer_tensor_shapes(config, layer)
    mixture = mixture_of(config, layer)
    if mixture is None or form is ExpertForm.STACKED:
        return shapes
    router, experts = shapes.pop(ROUTER_NAME), (shapes.pop(EXPERT_GATE_UP_NAME), shapes.pop(EXPERT_DOWN_NAME))
    shapes[_router_name(form)] = router
    (_, double_inner, hidden), (_, _, inner) = experts
    assert double_inner == 2 * inner, "gate and up have one size"
    for expert in range(mixture.num_experts):
        gate, up, down = _expert_names(form, expert)
        shapes |= {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
    return shapes


def fuse_layer(
    config: ModelConfig,
    layer: int,
    form: ExpertForm,
    tensors: dict[str, torch.Tensor],
    experts: range | None = None,
) -> LayerWeights:
    """Build a layer from the tensors that `layer_file_shapes` names; what is fused is taken out of `tensors`.

    `experts`: those of a mixture that `tensors` hold; None: all.
    """
    mixture = mixture_of(config, layer)
    held = range(mixture.num_experts) if experts is None and mixture is not None else experts or range(0)
    return LayerWeights(
        input_norm=tensors["input_layernorm.weight"],
        qkv=_fuse(tensors, [f"self_attn.{name}_proj" for name in "qkv"]),
        query_norm=tensors.get("self_attn.q_norm.weight"),
        key_norm=tensors.get("self_attn.k_norm.weight"),
        output=_fuse(tensors, ["self_attn.o_proj"]),
        feed_forward_norm=tensors["post_attention_layernorm.weight"],
        feed_forward=_fuse_dense(tensors, "mlp") if mixture is None else _fuse_experts(tensors, mixture, form, held),
    )


def _fuse_dense(tensors: dict[str, torch.Tensor], prefix: str) -> DenseWeights:
    return DenseWeights(
        gate_up=_fuse(tensors, [f"{prefix}.gate_proj", f"{prefix}.up_proj"]),
        down=_fuse(tensors, [f"{prefix}.down_proj"]),
    )


def _fuse_shared(tensors: dict[str, torch.Tensor], mixture: MixtureConfig) -> SharedExpertWeights | None:
    if mixture.shared_size is None:
        return None
    return SharedExpertWeights(block=_fuse_dense(tensors, SHARED_NAME), gate=tensors.pop(SHARED_GATE_NAME))


def _fuse_experts(
    tensors: dict[str, torch.Tensor], mixture: MixtureConfig, form: ExpertForm, held: range
) -> ExpertWeights:
    router, shared = tensors.pop(_router_name(form)), _fuse_shared(tensors, mixture)
    if form is ExpertForm.STACKED:
        gate_up, down = tensors.pop(EXPERT_GATE_UP_NAME), tensors.pop(EXPERT_DOWN_NAME)
        return ExpertWeights(
            router=router, gate_up=gate_up.unbind(0), down=down.unbind(0), shared=shared, first=held.start
        )
    gate_ups, downs = [], []
    for expert in held:
        gate, up, down_name = _expert_names(form, expert)
        gate_ups.append(torch.cat((tensors.pop(gate), tensors.pop(up))))
        downs.append(tensors.pop(down_name))
    return ExpertWeights(router=router, gate_up=tuple(gate_ups), down=tuple(downs), shared=shared, first=held.start)


def _router_name(form: ExpertForm) -> str:
    return "block_sparse_moe.gate.weight" if form is ExpertForm.MIXTRAL else ROUTER_NAME


def _expert_names(form: ExpertForm, expert: int) -> tuple[str, str, str]:
    if form is ExpertForm.MIXTRAL:
        gate, up, down = (f"block_sparse_moe.experts.{expert}.{name}.weight" for name in ("w1", "w3", "w2"))
    else:
        gate, up, down = (f"mlp.experts.{expert}.{name}_proj.weight" for name in ("gate", "up", "down"))
    return gate, up, down


def _fuse(tensors: dict[str, torch.Tensor], names: list[str]) -> Projection:
    weights = [tensors.pop(f"{name}.weight") for name in names]
    biases = [tensors.pop(f"{name}.bias") for name in names if f"{name}.bias" in tensors]
    return Projection(weight=torch.cat(weights), bias=torch.cat(biases) if biases else None)
