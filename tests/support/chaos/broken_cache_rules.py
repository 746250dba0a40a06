"""The engine's account of the KV cache with one rule broken, as `broken_rules` does it for the rest."""

from collections.abc import Callable

import msgspec
import pytest

from chaos.broken_rules import change_plans
from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import SlotFill

Patch = pytest.MonkeyPatch


def _change_fills(patch: Patch, change: Callable[[SlotFill], SlotFill]) -> None:
    change_plans(patch, lambda plan: msgspec.structs.replace(plan, fills=tuple(map(change, plan.fills))))


def keep_memory_that_was_given_up(patch: Patch) -> None:
    change_plans(patch, lambda plan: msgspec.structs.replace(plan, trims=()))


def keep_a_beginning_that_was_not_kept(patch: Patch) -> None:
    """The engine believes that content outlives the slot's next holder."""
    patch.setattr(SlotLedger, "_shrink", lambda _self, _slot, _num_blocks: None)


def copy_a_beginning_from_another_slot(patch: Patch) -> None:
    def neighbour(fill: SlotFill) -> SlotFill:
        return fill if fill.copy_from is None else msgspec.structs.replace(fill, copy_from=fill.copy_from ^ 1)

    _change_fills(patch, neighbour)


def forget_what_a_kept_beginning_said(patch: Patch) -> None:
    _change_fills(patch, lambda fill: msgspec.structs.replace(fill, cached_token_ids=()))


def copy_what_is_not_yet_written(patch: Patch) -> None:
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
    keep_memory_that_was_given_up,
    keep_a_beginning_that_was_not_kept,
    copy_a_beginning_from_another_slot,
    forget_what_a_kept_beginning_said,
    copy_what_is_not_yet_written,
    forget_a_token_at_preemption,
]
