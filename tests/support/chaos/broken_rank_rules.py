"""The runtime with one rule of ranks broken; as `broken_rules`. The first is what hung in vLLM."""

from collections.abc import Callable, Iterable

import msgspec
import pytest
import torch

from stageline_runtime.engine.group.rank_results import RankResults
from stageline_runtime.engine.scheduling.block_pool import BlockPool, CachedBlock
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, StepPlan
from stageline_runtime.plan_bus.step_plan import padded_size, plan_of_rank
from stageline_runtime.ranks.protocol import RankGroup
from stageline_runtime.sampling.part_draws import Vocabulary, candidates_of_part
from stageline_runtime.stage.ranks.joining import JoinedRanks
from stageline_runtime.stage.step.rank_sampling import PartDraws
from stageline_runtime.stage.telemetry.watchdog import Watchdog

Patch = pytest.MonkeyPatch


def _change_parts(patch: Patch, change: Callable[[StepPlan, StepPlan], StepPlan]) -> None:
    """`change` is given a whole plan and a rank's part of it."""

    def changed(plan: StepPlan, rank: int, ranks: int) -> StepPlan:
        return change(plan, plan_of_rank(plan, rank, ranks))

    patch.setattr("chaos.local_group.plan_of_rank", changed)


def let_a_rank_without_rows_rest(patch: Patch) -> None:
    _change_parts(patch, lambda plan, part: msgspec.structs.replace(part, dummy=plan.dummy))


def pad_each_part_for_itself(patch: Patch) -> None:
    def padded(_plan: StepPlan, part: StepPlan) -> StepPlan:
        return msgspec.structs.replace(part, padded_tokens=padded_size(part.num_tokens)) if part.rows else part

    _change_parts(patch, padded)


def pad_by_the_whole_plan_of_one_rank(patch: Patch) -> None:
    """The engine forgets that a rank may have most of a plan's tokens."""

    def evenly(rows: Iterable[PlanRow], ranks: int) -> int:
        return padded_size(-(-sum(row.num_tokens for row in rows) // ranks) or 1)

    patch.setattr("stageline_runtime.engine.scheduling.scheduler.padded_part", evenly)


def share_what_another_rank_holds(patch: Patch) -> None:
    find = SlotLedger._find

    def of_first(self: SlotLedger, _pool: BlockPool, inputs: tuple[int, ...], salt: str) -> list[CachedBlock]:
        return find(self, self._pools[0], inputs, salt)

    patch.setattr(SlotLedger, "_find", of_first)


def lend_a_ranks_blocks_to_another(patch: Patch) -> None:
    def of_all(self: SlotLedger, _rank: int) -> int:
        return self.num_blocks - self.held_blocks

    patch.setattr(SlotLedger, "available_blocks", of_all)


def tell_drafts_before_what_was_sampled(patch: Patch) -> None:
    patch.setattr(RankResults, "drafted", lambda self, drafted: self._on_drafted(drafted))


def rest_in_heartbeats_as_one_rank(patch: Patch) -> None:
    """The others wait for it there."""

    meet = JoinedRanks.meet

    def alone(self: JoinedRanks, plan: StepPlan, watchdog: Watchdog) -> None:
        if self.ranks.of_stage.rank > 0:
            meet(self, plan, watchdog)

    patch.setattr(JoinedRanks, "meet", alone)


def feed_back_what_each_rank_sampled(patch: Patch) -> None:
    def own(_ranks: RankGroup, feedback: torch.Tensor) -> torch.Tensor:
        return feedback

    patch.setattr("stageline_runtime.stage.step.runner.share_sampled", own)


def draw_only_from_the_first_part(patch: Patch) -> None:
    def first(parts: torch.Tensor) -> torch.Tensor:
        return parts[0, :, 1].long()

    patch.setattr("stageline_runtime.stage.step.rank_sampling.best_of_parts", first)


def forget_where_a_part_begins(patch: Patch) -> None:
    """Each rank takes its candidates for tokens of the first part."""

    def of_first(
        logits: torch.Tensor, _first: int, rows: list[RequestSampling], vocabulary: Vocabulary
    ) -> torch.Tensor:
        return candidates_of_part(logits, 0, rows, vocabulary)

    patch.setattr("stageline_runtime.stage.step.rank_sampling.candidates_of_part", of_first)


def take_verifying_rows_for_plain_ones(patch: Patch) -> None:
    def of_request(self: PartDraws, row: PlanRow) -> RequestSampling | None:
        generation, sampling = self._by_slot.get(row.slot, (0, None))
        return None if generation != row.generation else sampling

    patch.setattr(PartDraws, "_sampling_of", of_request)


BROKEN_RANK_RULES: list[Callable[[Patch], None]] = [
    let_a_rank_without_rows_rest,
    pad_each_part_for_itself,
    pad_by_the_whole_plan_of_one_rank,
    share_what_another_rank_holds,
    lend_a_ranks_blocks_to_another,
    tell_drafts_before_what_was_sampled,
    rest_in_heartbeats_as_one_rank,
]
BROKEN_RULES_OF_SHARED_LAYERS: list[Callable[[Patch], None]] = [
    feed_back_what_each_rank_sampled,
    draw_only_from_the_first_part,
    forget_where_a_part_begins,
    take_verifying_rows_for_plain_ones,
]
