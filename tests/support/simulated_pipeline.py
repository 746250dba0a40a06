"""A pipeline without tensors: plans run in order, a token follows from the request's prompt and position alone.

Decode inputs come from the real `SlotTokens`, so a token that feedback brought late, twice or to the wrong request
shows as a wrong input.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stageline_runtime.engine.request import Request
from stageline_runtime.messages import RowSampling, SampledRow, StepPlan
from stageline_runtime.stage.slot_tokens import SlotTokens

GREEDY = RowSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0)
STOP_TOKEN = 7


def make_request(name: str, prompt: tuple[int, ...], max_new_tokens: int, *, stops: bool = False) -> Request:
    """A greedy request."""
    stop_token_ids = frozenset({STOP_TOKEN}) if stops else frozenset[int]()
    return Request(
        request_id=name, prompt=prompt, sampling=GREEDY, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids
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
    sent: deque[StepPlan] = field(default_factory=deque)
    results: deque[tuple[int, tuple[SampledRow, ...]]] = field(default_factory=deque)
    _cache: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    _feedback: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = SlotTokens(self.num_slots)

    def send(self, plan: StepPlan) -> None:
        """A plan comes off the bus."""
        self.tokens.expect(plan)
        self.sent.append(plan)

    def run_next(self) -> None:
        """Run the oldest plan: fills, feedback, inputs, layers, sampling."""
        plan = self.sent.popleft()
        for fill in plan.fills:
            self._cache[fill.slot] = (fill.generation, [])
            self.tokens.fill(fill)
        self.tokens.apply_through(plan.feedback_through, self._feedback.pop)
        ids = self.tokens.inputs(plan).tolist()
        assert len(ids) == plan.padded_tokens
        sampled = []
        for row in plan.rows:
            inputs, ids = ids[: row.num_tokens], ids[row.num_tokens :]
            generation, history = self._cache[row.slot]
            if generation == row.generation:
                assert row.position == len(history), f"plan {plan.seq}: {row} after {len(history)} tokens"
                history += inputs
            if row.need_sample:
                sampled.append(SampledRow(row.slot, row.generation, next_token(tuple(history))))
        if plan.feedback_posted:
            self._feedback[plan.seq] = torch.tensor([[row.generation, 1, row.token] for row in sampled])
        self.results.append((plan.seq, tuple(sampled)))

    @property
    def num_unread_feedback(self) -> int:
        """Feedback sent that no plan has asked for."""
        return len(self._feedback)
