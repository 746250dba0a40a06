"""One decoder layer's weights, fused for the decoder from what its family describes.

Projections that share an input become one matrix: query, key and value; gate and up, also of every expert. Whether a
checkpoint has experts stacked or separate changes names only, never values or bytes.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from stageline_runtime.model_facts.layer import Gated, Layer, Linear, Mixture, Norm


class Projection(NamedTuple):
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


class LayerWeights:
    """One decoder layer's tensors by name. What is fused is taken out, so that it is never held twice."""

    def __init__(self, layer: Layer, tensors: dict[str, torch.Tensor], *, is_stacked: bool, experts: range) -> None:
        """`is_stacked`: whether experts are one tensor. `experts`: those that are there."""
        self.layer = layer
        self._tensors = tensors
        self._is_stacked = is_stacked
        self._experts = experts

    def norm(self, norm: Norm) -> torch.Tensor:
        return self._tensors.pop(norm.weight)

    def fused(self, *linears: Linear) -> Projection:
        """The rows of all, one below the other."""
        weights = [self._tensors.pop(linear.weight) for linear in linears]
        biases = [self._tensors.pop(linear.bias) for linear in linears if linear.bias in self._tensors]
        return Projection(weight=torch.cat(weights), bias=torch.cat(biases) if biases else None)

    def dense(self, block: Gated) -> DenseWeights:
        return DenseWeights(gate_up=self.fused(block.gate, block.up), down=self.fused(block.down))

    def mixture(self, mixture: Mixture) -> ExpertWeights:
        take = self._tensors.pop
        shared = None
        if mixture.shared is not None and mixture.shared_gate is not None:
            shared = SharedExpertWeights(block=self.dense(mixture.shared), gate=take(mixture.shared_gate.weight))
        if self._is_stacked:
            gate_ups, downs = take(mixture.gate_up).unbind(0), take(mixture.down).unbind(0)
        else:
            names = [mixture.expert_names(expert) for expert in self._experts]
            gate_ups = tuple(torch.cat((take(gate), take(up))) for gate, up, _ in names)
            downs = tuple(take(down) for _, _, down in names)
        router = take(mixture.router_name(is_stacked=self._is_stacked))
        return ExpertWeights(router=router, gate_up=gate_ups, down=downs, shared=shared, first=self._experts.start)
