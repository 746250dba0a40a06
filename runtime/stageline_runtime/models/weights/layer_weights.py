"""One decoder layer's weights, fused for the decoder from what its family describes.

Projections that share an input become one matrix: query, key and value; gate and up, also of every expert. Whether a
checkpoint has experts stacked or separate changes names only, never values or bytes.
"""

from dataclasses import dataclass

import torch

from stageline_runtime.model_facts.layer import Gated, Layer, Linear, Mixture, Norm

Tensors = dict[str, torch.Tensor]
"""By name within the layer; what is fused is taken out, so that it is never held twice."""


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
    """One decoder layer, as `Layer` names its parts. `qkv` stacks query, key and value rows."""

    attention_norm: torch.Tensor | None
    qkv: Projection
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Projection
    attended_norm: torch.Tensor | None
    feed_forward_norm: torch.Tensor | None
    feed_forward: DenseWeights | ExpertWeights
    forwarded_norm: torch.Tensor | None


def fuse_layer(layer: Layer, tensors: Tensors, *, is_stacked: bool, experts: range) -> LayerWeights:
    """Build a layer from its `tensors`, of which those of `experts` alone are there."""
    block = layer.feed_forward
    return LayerWeights(
        attention_norm=_norm(tensors, layer.attention_norm),
        qkv=_fuse(tensors, layer.query, layer.key, layer.value),
        query_norm=_norm(tensors, layer.query_norm),
        key_norm=_norm(tensors, layer.key_norm),
        output=_fuse(tensors, layer.output),
        attended_norm=_norm(tensors, layer.attended_norm),
        feed_forward_norm=_norm(tensors, layer.feed_forward_norm),
        feed_forward=_fuse_dense(tensors, block)
        if isinstance(block, Gated)
        else _fuse_experts(tensors, block, experts, is_stacked=is_stacked),
        forwarded_norm=_norm(tensors, layer.forwarded_norm),
    )


def _norm(tensors: Tensors, norm: Norm | None) -> torch.Tensor | None:
    return None if norm is None else tensors.pop(norm.weight)


def _fuse_dense(tensors: Tensors, block: Gated) -> DenseWeights:
    return DenseWeights(gate_up=_fuse(tensors, block.gate, block.up), down=_fuse(tensors, block.down))


def _fuse_experts(tensors: Tensors, mixture: Mixture, held: range, *, is_stacked: bool) -> ExpertWeights:
    shared = None
    if mixture.shared is not None and mixture.shared_gate is not None:
        gate = tensors.pop(mixture.shared_gate.weight)
        shared = SharedExpertWeights(block=_fuse_dense(tensors, mixture.shared), gate=gate)
    if is_stacked:
        gate_ups, downs = tensors.pop(mixture.gate_up).unbind(0), tensors.pop(mixture.down).unbind(0)
    else:
        names = [mixture.expert_names(expert) for expert in held]
        gate_ups = tuple(torch.cat((tensors.pop(gate), tensors.pop(up))) for gate, up, _ in names)
        downs = tuple(tensors.pop(down) for _, _, down in names)
    router = tensors.pop(mixture.router_name(is_stacked=is_stacked))
    return ExpertWeights(router=router, gate_up=gate_ups, down=downs, shared=shared, first=held.start)


def _fuse(tensors: Tensors, *linears: Linear) -> Projection:
    weights = [tensors.pop(linear.weight) for linear in linears]
    biases = [tensors.pop(linear.bias) for linear in linears if linear.bias in tensors]
    return Projection(weight=torch.cat(weights), bias=torch.cat(biases) if biases else None)
