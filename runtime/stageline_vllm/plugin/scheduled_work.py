"""What a step of vLLM's scheduler means to the state clock: its kind, its rows, whose requests are unfinished.

Read from `SchedulerOutput` alone, which every worker gets: a request is known from the step that brings it until the
step that says it is over. vLLM tells of the last finished request by a step without tokens, so a worker knows by itself
when nothing is left, and a wait is told apart into starved and idle without asking anybody.
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
