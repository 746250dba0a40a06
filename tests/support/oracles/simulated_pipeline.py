"""A pipeline without tensors: plans run in order, a token follows from the request's prompt and position alone.

Decode inputs come from the real `SlotTokens`, so a token that feedback brought late, twice or to the wrong request
shows as a wrong input.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.plan_bus.messages import PlanRow, RequestSampling, SampledRow, SlotFill, StepPlan
from stageline_runtime.plan_bus.step_plan import blocks_of, rank_of_slot
from stageline_runtime.stage.step.runner import SlotTokens

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
    """Most blocks that may ever lie in the slots of a pool together; None: not looked at."""
    num_pools: int = 1
    """Among which the slots are divided, each a rank's memory: nothing is copied between them."""
    sent: deque[StepPlan] = field(default_factory=deque)
    results: deque[tuple[int, tuple[SampledRow, ...]]] = field(default_factory=deque)
    _cache: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    _feedback: dict[int, Tensor] = field(default_factory=dict)
    _verified: set[int] = field(default_factory=set)
    _newest: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = SlotTokens(self.num_slots)

    def send(self, plan: StepPlan) -> None:
        """A plan comes off the bus."""
        self.tokens.expect(plan)
        self.sent.append(plan)

    def run_next(self) -> None:
        """Run the oldest plan: trims, fills, feedback, inputs, layers, sampling."""
        plan = self.sent.popleft()
        for trim in plan.trims:
            del self._content(trim.slot)[trim.num_tokens :]
        for fill in plan.fills:
            self._fill(fill)
        self.tokens.apply_through(plan.feedback_through, self._feedback.pop)
        ids = self.tokens.inputs(plan).tolist()
        assert len(ids) == plan.padded_tokens or self.num_pools > 1, "each rank pads its own part"
        sampled = []
        for row in plan.rows:
            inputs, ids = ids[: row.num_tokens], ids[row.num_tokens :]
            sampled += self._run_row(plan.seq, row, inputs)
        if plan.feedback_posted:
            self._feedback[plan.seq] = torch.tensor(
                [[row.generation, row.num_sampled, row.num_rejected, row.token] for row in sampled]
            )
        self.results.append((plan.seq, tuple(sampled)))
        held = Counter[int]()
        for slot, (_, history) in self._cache.items():
            held[rank_of_slot(slot, self.num_pools)] += blocks_of(len(history))
        assert self.num_blocks is None or all(blocks <= self.num_blocks for blocks in held.values()), f"{plan}: {held}"

    def _run_row(self, seq: int, row: PlanRow, inputs: list[int]) -> list[SampledRow]:
        generation, history = self._cache[row.slot]
        if generation == row.generation:
            if row.slot in self._verified:
                del history[row.position :]
            assert row.position == len(history), f"plan {seq}: {row} after {len(history)} tokens"
            self._verified.add(row.slot) if row.num_drafts else self._verified.discard(row.slot)
            history += inputs
        if not row.need_sample:
            return []
        if row.num_drafts and self._newest.get(row.slot) != (row.generation, row.position, inputs[0]):
            return [SampledRow(row.slot, row.generation, 0, num_sampled=0, num_rejected=row.num_drafts)]
        count, end = 1, row.position + row.num_tokens
        token = next_token(tuple(history[: end - row.num_drafts]))
        while count <= row.num_drafts and token == inputs[count]:
            count += 1
            token = next_token(tuple(history[: end - row.num_drafts + count - 1]))
        self._newest[row.slot] = (row.generation, end - row.num_drafts + count - 1, token)
        rejected = row.num_drafts + 1 - count
        return [SampledRow(row.slot, row.generation, token, num_sampled=count, num_rejected=rejected)]

    def _content(self, slot: int) -> list[int]:
        return self._cache.setdefault(slot, (0, []))[1]

    def _fill(self, fill: SlotFill) -> None:
        copied = fill.slot if fill.copy_from is None else fill.copy_from
        assert rank_of_slot(copied, self.num_pools) == rank_of_slot(fill.slot, self.num_pools), (
            f"{fill}: another rank's"
        )
        source = self._content(copied)
        assert len(source) >= fill.cached_tokens, f"{fill} of {len(source)} tokens"
        self._cache[fill.slot] = (fill.generation, source[: fill.cached_tokens])
        self._verified.discard(fill.slot)
        self.tokens.fill(fill)

    @property
    def num_unread_feedback(self) -> int:
        """Feedback sent that no plan has asked for."""
        return len(self._feedback)
