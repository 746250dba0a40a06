"""vLLM's scheduler with even microbatches: a step holds at most ceil(running / P) requests that decode.

With P stages up to P steps are in flight. vLLM schedules every request whose token has arrived, so requests that
once ran together stay together: all in one step, while the other stages are idle. Here decodes beyond their share
wait for the next step, which follows at once. Prefill is not capped, because prompt tokens fill a step well.

The cap hides surplus decodes from vLLM's own `schedule` and puts them back after it, so vLLM still manages KV
blocks, budgets and grammars. Requests that were scheduled longest ago run first, so none starves. Requests hidden
in a step are not preempted in it: when KV blocks run out, vLLM preempts the least urgent and latest of the requests
that it sees, possibly the one that needs the blocks. The next step hides other requests, so none is exempt for
long. vLLM declares its scheduler's interface not public: `seams.py` lists the parts used here.
"""

import math
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class _EvenCohorts(Scheduler):  # type: ignore[misc]
    """Mixin that precedes the scheduler class and caps its `schedule`."""

    running: "list[Request]"
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turn_of: dict[str, int] = {}
        """In which call a running request was last scheduled."""
        self._turn = 0

    def schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":
        surplus = self._surplus()
        if not surplus:
            return self._remember(super().schedule(*args, **kwargs))
        hidden = {id(request) for request in surplus}
        order = {id(request): index for index, request in enumerate(self.running)}
        self.running = [request for request in self.running if id(request) not in hidden]
        limit = self.max_num_active_reqs
        # The hidden ones run too: as many fewer may be admitted from the queue.
        self.max_num_active_reqs = limit - len(surplus)
        try:
            return self._remember(super().schedule(*args, **kwargs))
        finally:
            self.max_num_active_reqs = limit
            # Newly admitted ones come last, as vLLM would have appended them.
            self.running = sorted([*self.running, *surplus], key=lambda one: order.get(id(one), len(order)))

    def _surplus(self) -> "list[Request]":
        """Ready decodes beyond their share of a step, those scheduled last the longest ago kept."""
        stages = self.parallel_config.pipeline_parallel_size
        share = math.ceil(len(self.running) / stages)
        ready = [request for request in self.running if _can_decode(request, self.current_step + 1)]
        if stages == 1 or len(ready) <= share:
            return []
        ready.sort(key=lambda request: self._turn_of.get(request.request_id, 0))
        return ready[share:]

    def _remember(self, output: "SchedulerOutput") -> "SchedulerOutput":
        self._turn += 1
        for request_id in output.num_scheduled_tokens:
            self._turn_of[request_id] = self._turn
        for request_id in output.finished_req_ids:
            self._turn_of.pop(request_id, None)
        return output


def _can_decode(request: "Request", step: int) -> bool:
    """Would vLLM schedule this running request's next token in `step`?

    Not while its last token is in flight. Nor, with asynchronous scheduling, once the steps in flight reach its
    maximum length: such a request would take a place in the step without using it.
    """
    on_their_way = request.num_output_placeholders
    decided = request.num_computed_tokens + 2 - on_their_way  # without drafts, as vLLM counts them
    if on_their_way > 0 and decided >= request.num_prompt_tokens + request.max_tokens:
        return False
    left = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
    return not request.is_prefill_chunk and left > 0 and request.next_decode_eligible_step <= step


class EvenCohortsScheduler(_EvenCohorts):
    """On top of the synchronous scheduler."""


class AsyncEvenCohortsScheduler(_EvenCohorts, AsyncScheduler):  # type: ignore[misc]
    """On top of the asynchronous scheduler, which inherits `schedule` from `Scheduler`."""


def even_cohorts_scheduler(**kwargs: Any) -> EvenCohortsScheduler | AsyncEvenCohortsScheduler:
    """For `--scheduler-cls`: which of the two is only known once vLLM has settled its configuration."""
    is_asynchronous = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (AsyncEvenCohortsScheduler if is_asynchronous else EvenCohortsScheduler)(**kwargs)
