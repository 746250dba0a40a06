"""A pipeline without tensors: plans run in order, a token follows from the request's prompt and position alone.

Decode inputs come from the real `SlotTokens`, so a token that feedback brought late, twice or to the wrong request
shows as a wrong input.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oracles.paged_store import PagedStore
from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SampledRow, StepPlan
from stageline_runtime.plan_bus.step_plan import rank_of_slot
from stageline_runtime.stage.step.slot_tokens import SlotTokens

GREEDY = RequestSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0)
STOP_TOKEN = 7


def make_request(
    name: str,
    prompt: tuple[int, ...],
    max_new_tokens: int,
    *,
    stops: bool = False,
    priority: int = 0,
    output: tuple[int, ...] = (),
) -> Request:
    """A greedy request; `output` was generated before."""
    return Request(
        request_id=name,
        prompt=prompt,
        sampling=GREEDY,
        max_new_tokens=max_new_tokens,
        stop_token_ids=frozenset({STOP_TOKEN}) if stops else frozenset(),
        priority=priority,
        output=list(output),
    )


def next_token(history: tuple[int, ...]) -> int:
    """The token after `history`; any wrong token in it changes all that follow. `STOP_TOKEN` comes now and then."""
    value = 17
    for token in history:
        value = (value * 31 + token) % 1_000_003
    return value % 23


def expected_output(request: Request) -> list[int]:
    """What `request` must produce."""
    history = list(request.prompt)
    output: list[int] = []
    while len(output) < request.max_new_tokens:
        output.append(next_token((*history, *output)))
        if output[-1] in request.stop_token_ids:
            break
    return output


@dataclass
class SimulatedPipeline:
    """First stage, cache and last stage in one; `sent` holds plans that were sent and not yet run."""

    num_slots: int
    num_blocks: int | None = None
    """Of each rank; None: any number."""
    num_ranks: int = 1
    """Among which the slots are divided, each with a cache of its own."""
    sent: deque[StepPlan] = field(default_factory=deque)
    results: deque[tuple[int, tuple[SampledRow, ...]]] = field(default_factory=deque)
    _feedback: dict[int, Tensor] = field(default_factory=dict)
    _verified: set[int] = field(default_factory=set)
    _newest: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = SlotTokens(self.num_slots)
        self._caches = [PagedStore(f"rank {rank}", self.num_blocks) for rank in range(self.num_ranks)]

    def send(self, plan: StepPlan) -> None:
        """A plan comes off the bus."""
        self.tokens.expect(plan)
        self.sent.append(plan)

    def run_next(self) -> None:
        """Run the oldest plan: tables, fills, feedback, inputs, layers, sampling."""
        plan = self.sent.popleft()
        for change in plan.tables:
            self._cache_of(change.slot).change([change])
        for fill in plan.fills:
            self._cache_of(fill.slot).read(fill.slot, fill.cached_tokens)
            self._verified.discard(fill.slot)
            self.tokens.fill(fill)
        self.tokens.apply_through(plan.feedback_through, self._feedback.pop)
        ids = self.tokens.inputs(plan).tolist()
        assert len(ids) == plan.padded_tokens or self.num_ranks > 1, "each rank pads its own part"
        sampled = []
        for row in plan.rows:
            inputs, ids = ids[: row.num_tokens], ids[row.num_tokens :]
            sampled += self._run_row(plan.seq, row, inputs)
        if plan.feedback_posted:
            self._feedback[plan.seq] = torch.tensor([[row.token] for row in sampled])
        self.results.append((plan.seq, tuple(sampled)))

    def _cache_of(self, slot: int) -> PagedStore:
        return self._caches[rank_of_slot(slot, self.num_ranks)]

    def _run_row(self, seq: int, row: PlanRow, inputs: list[int]) -> list[SampledRow]:
        cache = self._cache_of(row.slot)
        if row.slot in self._verified:
            cache.forget(row.slot, row.position)
        cache.write(row.slot, row.position, inputs)
        self._verified.add(row.slot) if row.num_drafts else self._verified.discard(row.slot)
        history = cache.read(row.slot, row.position + row.num_tokens)
        if not row.need_sample:
            return []
        if row.num_drafts:
            newest = self._newest.get(row.slot)
            assert newest == (row.generation, row.position, inputs[0]), f"plan {seq}: {row} after {newest}"
        count, end = 1, row.position + row.num_tokens
        token = next_token(tuple(history[: end - row.num_drafts]))
        while count <= row.num_drafts and token == inputs[count]:
            count += 1
            token = next_token(tuple(history[: end - row.num_drafts + count - 1]))
        self._newest[row.slot] = (row.generation, end - row.num_drafts + count - 1, token)
        return [SampledRow(row.slot, row.generation, token, num_sampled=count)]
