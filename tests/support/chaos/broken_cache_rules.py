"""The engine's account of the KV cache with one rule broken, as `broken_rules` does it for the rest."""

from collections.abc import Callable, Iterable

import msgspec
import pytest

from chaos.broken_rules import change_plans
from stageline_runtime.engine.scheduling.block_pool import BlockPool
from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.plan_bus.messages import SlotBlocks, SlotFill

Patch = pytest.MonkeyPatch


def _change_fills(patch: Patch, change: Callable[[SlotFill], SlotFill]) -> None:
    change_plans(patch, lambda plan: msgspec.structs.replace(plan, fills=tuple(map(change, plan.fills))))


def _change_tables(patch: Patch, change: Callable[[SlotBlocks], SlotBlocks]) -> None:
    change_plans(patch, lambda plan: msgspec.structs.replace(plan, tables=tuple(map(change, plan.tables))))


def give_away_a_block_that_is_shared(patch: Patch) -> None:
    """A block is free as soon as one of its requests gives it up."""
    release = BlockPool.release

    def release_all(self: BlockPool, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        for block in blocks:
            self._references[block] = 1
        release(self, blocks)

    patch.setattr(BlockPool, "release", release_all)


def keep_a_beginning_that_was_not_kept(patch: Patch) -> None:
    """The engine believes that a block's content outlives its next holder."""

    patch.setattr(BlockPool, "_forget", BlockPool._free)


def share_the_beginning_of_another(patch: Patch) -> None:
    """Shared blocks are told in another order than that of their positions."""

    def turned(change: SlotBlocks) -> SlotBlocks:
        return change if change.are_new else msgspec.structs.replace(change, blocks=change.blocks[::-1])

    _change_tables(patch, turned)


def forget_what_a_kept_beginning_said(patch: Patch) -> None:
    _change_fills(patch, lambda fill: msgspec.structs.replace(fill, cached_token_ids=()))


def share_what_is_not_yet_written(patch: Patch) -> None:
    """Blocks count as computed from the moment their request has a slot."""
    patch.setattr(Request, "known_computed_tokens", property(lambda self: len(self.inputs)))


def forget_a_token_at_preemption(patch: Patch) -> None:
    """A request that starts again leaves out the newest token that its client has."""
    restart = Request.restart

    def forget(self: Request) -> None:
        if self.started and self.output:
            self.output.pop()
        restart(self)

    patch.setattr(Request, "restart", forget)


BROKEN_CACHE_RULES: list[Callable[[Patch], None]] = [
    give_away_a_block_that_is_shared,
    keep_a_beginning_that_was_not_kept,
    share_the_beginning_of_another,
    forget_what_a_kept_beginning_said,
    share_what_is_not_yet_written,
    forget_a_token_at_preemption,
]
