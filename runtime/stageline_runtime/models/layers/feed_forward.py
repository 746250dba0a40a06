"""The feed-forward block of a layer: a dense one, or a mixture with a router that picks some experts for each token.

Runs on the device of its weights. Only the picked experts run differently: one after the other here, in one grouped
product on devices (`grouped_experts`).
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from stageline_runtime.model_facts.model_config import MixtureConfig
from stageline_runtime.models.layers.row_modules import Linear, RowOperators
from stageline_runtime.models.weights.stage_weights import DenseWeights, ExpertWeights
from stageline_runtime.ranks.expert_exchange import ExpertExchange


class FeedForward:
    """Gated feed-forward block `[num_tokens, hidden_size]` to the same shape: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, weights: DenseWeights, kernels: RowOperators | None) -> None:
        self._gate_up = Linear(*weights.gate_up)
        self._down = Linear(*weights.down)
        self._kernels = kernels

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        gate_up = self._gate_up(rows)
        if self._kernels is not None:
            return self._down(self._kernels.gate(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self._down(F.silu(gate) * up)


class HeldExperts(Protocol):
    """The experts of a mixture that are held here, all of them or one rank's."""

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor, /) -> torch.Tensor:
        """What they give for `rows` `[num_tokens, hidden_size]`, of the same shape; zero where a token picks none.

        `picked` `[num_tokens, experts_per_token]` are ids among all experts, in any order; `weights`, of that shape and
        float32, weight each.
        """


RunExperts = Callable[[ExpertWeights], HeldExperts]


class ExpertLoop:
    """One expert after the other, each for the tokens that picked it: its weights are read once a step, and never for
    an expert without tokens. Shapes depend on the picks, which the host has to know."""

    def __init__(self, weights: ExpertWeights) -> None:
        self._num_experts = len(weights.router)
        self._first = weights.first
        self._gate_up = tuple(Linear(weight) for weight in weights.gate_up)
        self._down = tuple(Linear(weight) for weight in weights.down)

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor, /) -> torch.Tensor:
        order = picked.flatten().argsort(stable=True)
        counts = picked.flatten().bincount(minlength=self._num_experts).tolist()
        output = torch.zeros_like(rows)
        start = sum(counts[: self._first])
        held = counts[self._first : self._first + len(self._down)]
        for gate_up, down, count in zip(self._gate_up, self._down, held, strict=True):
            if count == 0:
                continue
            picks = order[start : start + count]
            tokens = picks // picked.shape[1]
            gate, up = gate_up(rows[tokens]).chunk(2, dim=-1)
            result = down(F.silu(gate) * up) * weights.flatten()[picks, None]
            output.index_add_(0, tokens, result.to(output.dtype))
            start += count
        return output


class ExpertMixture:
    """A mixture of experts as feed-forward block: a router picks experts for each token, and only those picked run.

    `sum over picked experts of weight * down(silu(gate(x)) * up(x))`. Numerics follow Hugging Face's: routing weights
    are a float32 softmax over all experts, and the experts' outputs are summed in ascending order of the expert. A
    shared expert runs for all tokens and comes last, weighted by `sigmoid(shared_gate(x))`.

    With an `exchange`, `experts` are those of one rank. Router and these run for the rows of all ranks, and what they
    give is summed over the ranks; each gets the sums of its own rows, for which alone its shared expert runs. No row,
    of padding or of another rank, has a part in what another row gives.
    """

    def __init__(
        self,
        mixture: MixtureConfig,
        weights: ExpertWeights,
        experts: HeldExperts,
        kernels: RowOperators | None,
        exchange: ExpertExchange | None = None,
    ) -> None:
        self._mixture = mixture
        self._exchange = exchange
        shared = weights.shared
        self._shared = None if shared is None else (FeedForward(shared.block, kernels), Linear(shared.gate))
        self._router = Linear(weights.router)
        self._experts = experts

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._exchange is None:
            output = self._run_experts(rows)
        else:
            output = self._exchange.scatter(self._run_experts(self._exchange.gather(rows)))
        if self._shared is None:
            return output
        shared_block, shared_gate = self._shared
        return output + torch.sigmoid(shared_gate(rows)) * shared_block(rows)

    def _run_experts(self, rows: torch.Tensor) -> torch.Tensor:
        return self._experts(rows, *self._route(rows))

    def _route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and expert ids `[num_tokens, experts_per_token]` of each token's picked experts."""
        probabilities = F.softmax(self._router(rows), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self._mixture.experts_per_token, dim=-1)
        if self._mixture.normalise_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts
