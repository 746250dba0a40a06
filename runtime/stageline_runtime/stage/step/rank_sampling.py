"""Sampling where the last stage has several ranks, each of which has the logits of a part of the vocabulary.

If a plan's requests are drawn from the unmodified logits, each rank draws from its part (`part_draws`): the ranks
exchange a score and an id for each row, or the best candidates of a restricted row. Which plans these are follows from
the plans and their fills, so all ranks know. The first rank decides everything that depends on data: whether the
candidates settle restricted rows. It sends that with the tokens. If they don't, all ranks gather the logits.

All other plans gather the logits too. There a rank alone could decide differently, for example if a grammar took too
long to compile on one rank only. So the first rank samples, and the others get its rows in one more exchange.
"""

import torch
from torch import Tensor

from stageline_runtime.accelerator.protocol import ComputeDevice
from stageline_runtime.model_facts.rank_cut import head_rows
from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, StepPlan
from stageline_runtime.ranks.protocol import RankGroup
from stageline_runtime.sampling.part_draws import (
    OPEN,
    Vocabulary,
    best_of_part,
    best_of_parts,
    candidates_of_part,
    draw_among_parts,
)
from stageline_runtime.sampling.sampler import is_free
from stageline_runtime.stage.step.host_tensors import int64s
from stageline_runtime.stage.step.pending_rows import PendingRows
from stageline_runtime.stage.step.sampling_state import is_plain
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH

SHARE_SAMPLED = "all-gather, sampled rows"
SHARE_BEST = "all-gather, best of parts"
SHARE_CANDIDATES = "all-gather, candidates of parts"
SHARE_DRAWN = "all-gather, drawn tokens"


def share_sampled(ranks: RankGroup, feedback: Tensor) -> Tensor:
    """The first rank's `[num_sampled_rows, 1]`, whatever the others give."""
    return feedback if ranks.size == 1 else ranks.all_gather(feedback, SHARE_SAMPLED)[0]


class PartDraws:
    """Draws of one rank of the last stage, together with the others, for the plans that can be drawn by parts."""

    def __init__(self, ranks: RankGroup, first_token: int, vocab_size: int) -> None:
        """`first_token` of this rank's part."""
        self._ranks = ranks
        self._first_token = first_token
        self._vocabulary = Vocabulary(vocab_size, head_rows(vocab_size, ranks.size))
        self._by_slot: dict[int, tuple[int, RequestSampling | None]] = {}
        """Generation, and how its request samples; None: not by parts."""

    def accept(self, plan: StepPlan) -> None:
        """Take a plan's fills; called once for each plan, in order, before `draw`."""
        for fill in plan.fills:
            self._by_slot[fill.slot] = fill.generation, fill.sampling if is_plain(fill.sampling) else None

    def rows_of(self, plan: StepPlan) -> list[RequestSampling] | None:
        """How each of the plan's sampled rows is drawn; None where it can't be by parts."""
        rows = [self._sampling_of(row) for row in plan.sampled_rows]
        found = [row for row in rows if row is not None]
        return found if len(found) == len(rows) else None

    def draw(self, plan: StepPlan, rows: list[RequestSampling], logits: Tensor) -> list[int] | None:
        """The tokens of a plan's sampled rows, from float32 `logits` of this rank's part; None, on all ranks, where all
        logits are needed.
        """
        positions = [row.position + row.num_tokens for row in plan.sampled_rows]
        tokens = torch.empty(len(rows), dtype=torch.int64)
        are_free = [is_free(row, self._vocabulary.size) for row in rows]
        if all(are_free):
            tokens = self._draw_free(logits, rows, positions)
        else:
            for kind, draw in ((True, self._draw_free), (False, self._draw_restricted)):
                places = [index for index, free in enumerate(are_free) if free is kind]
                if places:
                    chosen = [rows[index] for index in places], [positions[index] for index in places]
                    tokens[places] = draw(logits[places], *chosen)
            tokens = self._ranks.all_gather(tokens, SHARE_DRAWN)[0]
        drawn: list[int] = tokens.tolist()
        return None if OPEN in drawn else drawn

    def _draw_free(self, logits: Tensor, rows: list[RequestSampling], positions: list[int]) -> Tensor:
        best = best_of_part(logits, self._first_token, rows, positions)
        return best_of_parts(self._ranks.all_gather(best, SHARE_BEST))

    def _draw_restricted(self, logits: Tensor, rows: list[RequestSampling], positions: list[int]) -> Tensor:
        own = candidates_of_part(logits, self._first_token, rows, self._vocabulary)
        return draw_among_parts(self._ranks.all_gather(own, SHARE_CANDIDATES), rows, positions, self._vocabulary)

    def _sampling_of(self, row: PlanRow) -> RequestSampling | None:
        generation, sampling = self._by_slot.get(row.slot, (0, None))
        return None if row.num_drafts or generation != row.generation else sampling


class OtherRankSampling:
    """Stands in for `SamplingState` on all ranks but the first."""

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device

    def accept(self, _plan: StepPlan, /) -> None:
        """Nothing: requests are the first rank's."""

    def sample(self, plan: StepPlan, _logits: Tensor, /) -> tuple[PendingRows, Tensor]:
        """No row for the engine, and a place for the first rank's feedback."""
        shape = len(plan.sampled_rows), FEEDBACK_WIDTH
        return PendingRows.known(()), torch.zeros(shape, dtype=torch.int64, device=self._device.device)

    def take_drawn(self, _plan: StepPlan, tokens: list[int]) -> tuple[PendingRows, Tensor]:
        """No row for the engine, and the feedback that the first rank has too."""
        return PendingRows.known(()), self._device.place(int64s(tokens)).unsqueeze(1)
