"""A mixture of experts as feed-forward block: a router picks experts for each token, and only those picked run.

Tokens are grouped by expert, so that an expert's weights are read once a step and never for an expert without tokens.
Numerics follow Hugging Face's: routing weights are a float32 softmax over all experts, and the experts' outputs are
summed in ascending order of the expert. Which experts run depends on the tokens, so shapes do too: this block can't be
part of a captured graph.
"""

import torch
import torch.nn.functional as F

from stageline_runtime.model_facts.model_config import MixtureConfig
from stageline_runtime.models.cpu.linear import Linear
from stageline_runtime.models.weights.layer_weights import ExpertWeights


class ExpertMixture:
    """`sum over picked experts of weight * down(silu(gate(x)) * up(x))`."""

    def __init__(self, mixture: MixtureConfig, weights: ExpertWeights) -> None:
        self._mixture = mixture
        self._router = Linear(weights.router)
        self._gate_up = tuple(Linear(weight) for weight in weights.gate_up)
        self._down = tuple(Linear(weight) for weight in weights.down)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens, hidden_size]` to the same shape."""
        weights, experts = self._route(rows)
        picks_of_token = experts.shape[1]
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self._mixture.num_experts).tolist()
        output = torch.zeros_like(rows)
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            picks = order[start : start + count]
            tokens = picks // picks_of_token
            gate, up = self._gate_up[expert](rows[tokens]).chunk(2, dim=-1)
            result = self._down[expert](F.silu(gate) * up) * weights.flatten()[picks, None]
            output.index_add_(0, tokens, result.to(output.dtype))
            start += count
        return output

    def _route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and expert ids `[num_tokens, experts_per_token]` of each token's picked experts."""
        probabilities = F.softmax(self._router(rows), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self._mixture.experts_per_token, dim=-1)
        if self._mixture.normalise_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts
