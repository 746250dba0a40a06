"""Small stand-ins for vLLM's schedulers, as far as even cohorts lean on them, and the modules to import them from.

Kept of vLLM: which running request is scheduled when, admission, preemption of the last one, counters of a request.
Left out: KV blocks, speculation, grammars. tests/vllm holds names and the signature of `schedule` against the wheel.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass(eq=False, slots=True)
class Request:
    request_id: str
    num_tokens_with_spec: int = 1
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    next_decode_eligible_step: int = 0
    is_prefill_chunk: bool = False
    num_prompt_tokens: int = 1
    max_tokens: int = 1000


@dataclass
class SchedulerOutput:
    num_scheduled_tokens: dict[str, int]
    finished_req_ids: set[str] = field(default_factory=set)


class Scheduler:
    def __init__(self, *, vllm_config: Any) -> None:
        self.parallel_config = vllm_config.parallel_config
        self.max_num_running_reqs = vllm_config.scheduler_config.max_num_seqs
        self.max_num_active_reqs = self.max_num_running_reqs
        self.chunk = 4
        """Tokens of one prompt in one step."""
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.finished_req_ids: set[str] = set()
        self.current_step = 0
        self.preempt_next = False
        self.fail_next = False

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        assert not throttle_prefills, "the stand-in holds no prefill back"
        self.current_step += 1
        if self.fail_next:
            raise RuntimeError("no step today")
        preempts, self.preempt_next = self.preempt_next, False
        if preempts:
            self._preempt_request(self.running.pop())
        scheduled: dict[str, int] = {}
        for request in self.running:
            if _has_its_last_token_on_its_way(request):
                continue
            left = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            if left > 0 and request.next_decode_eligible_step <= self.current_step:
                scheduled[request.request_id] = min(left, self.chunk)
        while self.waiting and not preempts and len(self.running) < self.max_num_active_reqs:
            request = self.waiting.pop(0)
            self.running.append(request)
            scheduled[request.request_id] = min(request.num_tokens_with_spec, self.chunk)
        assert len(self.running) <= self.max_num_running_reqs, self.running
        output = SchedulerOutput(scheduled, self.finished_req_ids)
        self._update_after_schedule(output)
        return output

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        for request in self.running:
            request.num_computed_tokens += scheduler_output.num_scheduled_tokens.get(request.request_id, 0)
            total = request.num_tokens_with_spec + request.num_output_placeholders
            request.is_prefill_chunk = request.num_computed_tokens < total and request.is_prefill_chunk
            if request.request_id in scheduler_output.num_scheduled_tokens:
                request.is_prefill_chunk = request.num_computed_tokens < total
        self.finished_req_ids = set()

    def _preempt_request(self, request: Request) -> None:
        request.num_computed_tokens = request.num_output_placeholders = 0
        self.waiting.insert(0, request)

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)

    def finish_requests(self, request_id: str) -> None:
        self.running = [request for request in self.running if request.request_id != request_id]
        self.finished_req_ids.add(request_id)


def _has_its_last_token_on_its_way(request: Request) -> bool:
    on_their_way = request.num_output_placeholders
    decided = request.num_computed_tokens + 2 - on_their_way
    return on_their_way > 0 and decided >= request.num_prompt_tokens + request.max_tokens


class AsyncScheduler(Scheduler):
    """A request may be scheduled again P steps later, its token on its way or not."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request in self.running:
            if request.request_id in scheduler_output.num_scheduled_tokens and not request.is_prefill_chunk:
                request.num_output_placeholders += 1
                stages = self.parallel_config.pipeline_parallel_size
                request.next_decode_eligible_step = self.current_step + stages


def vllm_config(stages: int, most: int = 64, *, asynchronous: bool = False) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        scheduler_config=SimpleNamespace(max_num_seqs=most, async_scheduling=asynchronous),
    )


PLUGIN = "stageline_vllm.plugin.even_cohorts"


@contextmanager
def even_cohorts_over_stand_ins() -> Iterator[ModuleType]:
    """The plugin imported over the stand-ins; afterwards neither it nor they are left imported."""
    parts = "vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"
    modules = {name: ModuleType(name) for name in parts}
    for name, held in (("scheduler", Scheduler), ("async_scheduler", AsyncScheduler)):
        module = modules[f"{parts[-1]}.{name}"] = ModuleType(f"{parts[-1]}.{name}")
        setattr(module, held.__name__, held)
    before = {name: sys.modules.pop(name, None) for name in (*modules, PLUGIN)}
    sys.modules.update(modules)
    try:
        yield importlib.import_module(PLUGIN)
    finally:
        for name, module_before in before.items():
            sys.modules.pop(name, None)
            if module_before is not None:
                sys.modules[name] = module_before
