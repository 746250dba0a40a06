"""Translates a step of vLLM's scheduler for the state clock: its kind, its rows, its unfinished requests.

Read from `SchedulerOutput` alone, which every worker receives: a request is known from the step that adds it until
the step that reports it finished. vLLM reports the last finished request in a step without tokens. So a
worker knows when no request is left and can separate starved from idle waits without a query.
"""

from operator import add
from typing import TYPE_CHECKING, NamedTuple

from stageline_vllm.worker_state import State

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class ScheduledWork(NamedTuple):
    kind: State | None
    """None for a step without tokens."""
    rows: int
    tokens: int


class UnfinishedRequests:
    """Tokens in the cache by request that is not over."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def kv_tokens(self) -> int:
        """Of all of them together."""
        return sum(self._tokens.values())

    def take(self, step: "SchedulerOutput") -> ScheduledWork:
        """A step has been handed over."""
        held, scheduled = self._tokens, step.num_scheduled_tokens
        for request_id in step.finished_req_ids:
            held.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            held[new.req_id] = new.num_computed_tokens + scheduled.get(new.req_id, 0)
        cached = step.scheduled_cached_reqs
        tokens = [scheduled.get(request_id, 0) for request_id in cached.req_ids]
        held.update(zip(cached.req_ids, map(add, cached.num_computed_tokens, tokens), strict=True))
        rows, total = len(scheduled), step.total_num_scheduled_tokens
        prompts = len(step.scheduled_new_reqs) + (sum(one > 1 for one in tokens) if total > rows else 0)
        return ScheduledWork(_kind(prompts, rows), rows, total)


def _kind(prompts: int, rows: int) -> State | None:
    """A prompt's last chunk of a single token counts as a decode: it costs as much."""
    if rows == 0:
        return None
    if prompts == 0:
        return State.DECODE
    return State.PREFILL if prompts == rows else State.MIXED
