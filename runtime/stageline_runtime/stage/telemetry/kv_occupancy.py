"""How much of a stage's KV cache holds something, worked out from the plans it runs. Pure.

A stage is not told when a request ends, so an ended request's tokens count until its slot is given out again: this is
what lies in the cache, not what is promised (the engine's `kv_cache_usage_ratio`).
"""

from stageline_runtime.plan_bus.messages import StepPlan


class KvOccupancy:
    """Tokens whose keys and values lie in the slots."""

    def __init__(self) -> None:
        self._tokens_of_slot: dict[int, int] = {}
        self.tokens = 0
        """All slots together."""

    def note(self, plan: StepPlan) -> None:
        """A plan has been run: its trims and fills emptied slots but for a rest, its rows wrote behind that."""
        for trim in plan.trims:
            self._set(trim.slot, min(trim.num_tokens, self._tokens_of_slot.get(trim.slot, 0)))
        for fill in plan.fills:
            self._set(fill.slot, fill.cached_tokens)
        for row in plan.rows:
            self._set(row.slot, row.position + row.num_tokens)

    def _set(self, slot: int, tokens: int) -> None:
        self.tokens += tokens - self._tokens_of_slot.get(slot, 0)
        self._tokens_of_slot[slot] = tokens
