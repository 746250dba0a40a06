"""Sampling where the last stage has several ranks: the first one samples, and all learn what it sampled.

Every rank has the logits, but a rank by itself could decide otherwise: a grammar that took too long to compile on one
of them alone would be enough. So one decides, and the others take its rows, in one exchange for every plan that
samples. The others keep nothing of a request.
"""

import torch
from torch import Tensor

from stageline_runtime.plan_bus.messages import SampledRow, StepPlan
from stageline_runtime.ranks.protocol import RankGroup
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH

SHARE_SAMPLED = "all-gather, sampled rows"


def share_sampled(ranks: RankGroup, feedback: Tensor) -> Tensor:
    """The first rank's `[num_sampled_rows, 4]`, whatever the others give."""
    return feedback if ranks.size == 1 else ranks.all_gather(feedback, SHARE_SAMPLED)[0]


class OtherRankSampling:
    """Stands in for `SamplingState` on all ranks but the first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def accept(self, _plan: StepPlan, /) -> None:
        """Nothing: requests are the first rank's."""

    def sample(self, plan: StepPlan, _logits: Tensor, /) -> tuple[tuple[SampledRow, ...], Tensor]:
        """No row for the engine, and a place for the first rank's feedback."""
        return self.leave_out(plan)

    def leave_out(self, plan: StepPlan) -> tuple[tuple[SampledRow, ...], Tensor]:
        """The same, for a plan that nobody waits for."""
        return (), torch.zeros(len(plan.sampled_rows), FEEDBACK_WIDTH, dtype=torch.int64, device=self._device)
