"""What the state clock makes of vLLM's scheduler output: kind of step, rows, whose requests are unfinished."""

from types import SimpleNamespace
from typing import Any

import pytest

from stageline_vllm.plugin.scheduled_work import UnfinishedRequests
from stageline_vllm.worker_state import State


def step(
    *,
    new: dict[str, int] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    finished: tuple[str, ...] = (),
) -> Any:
    """A SchedulerOutput: prompts' tokens by new request, (computed, scheduled) tokens by known one."""
    new, cached = new or {}, cached or {}
    scheduled = {**new, **{name: tokens for name, (_, tokens) in cached.items() if tokens}}
    return SimpleNamespace(
        finished_req_ids=set(finished),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0) for name in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[computed for computed, _ in cached.values()]
        ),
    )


@pytest.mark.parametrize(
    ("output", "kind", "rows", "tokens"),
    [
        (step(new={"a": 32, "b": 5}), State.PREFILL, 2, 37),
        (step(cached={"a": (32, 1), "b": (5, 1)}), State.DECODE, 2, 2),
        (step(new={"c": 7}, cached={"a": (32, 1)}), State.MIXED, 2, 8),
        (step(cached={"a": (32, 64)}), State.PREFILL, 1, 64),
        (step(cached={"a": (32, 64), "b": (5, 1)}), State.MIXED, 2, 65),
        (step(finished=("a",)), None, 0, 0),
    ],
)
def test_a_steps_kind_is_what_its_rows_are(output: Any, kind: State | None, rows: int, tokens: int) -> None:
    assert UnfinishedRequests().take(output) == (kind, rows, tokens)


def test_requests_are_unfinished_from_their_first_step_until_the_scheduler_says_they_are_over() -> None:
    requests = UnfinishedRequests()
    requests.take(step(new={"a": 32, "b": 5}))
    assert (len(requests), requests.kv_tokens) == (2, 37)
    requests.take(step(cached={"a": (32, 1), "b": (5, 1)}))
    assert (len(requests), requests.kv_tokens) == (2, 39)
    requests.take(step(cached={"b": (6, 1)}, finished=("a",)))
    assert (len(requests), requests.kv_tokens) == (1, 7)
    requests.take(step(finished=("b", "never seen here")))
    assert (len(requests), requests.kv_tokens) == (0, 0)
