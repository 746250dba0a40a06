"""The scheduler: which rows go into the next plan. Pure: no clock, no socket, no torch.

There are as many cohorts as stages; one plan carries rows of one cohort. A request joins the lightest cohort; when ends
leave the cohorts uneven, requests change over, so that no plan carries more than `ceil(running / cohorts)` requests (an
uneven pipeline waits for its largest cohort). Plans are made round robin over the cohorts that have something to run:
first a decode row for each request whose newest token is sampled or about to be, then prefill chunks within the token
budget. At most one decode of a request is in flight and one more waits for its feedback, in every mode, because this is
the only place rows are made.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from stageline_runtime.engine.request import Request
from stageline_runtime.engine.slots import SlotLedger
from stageline_runtime.graphs.mode import plan_graph_mode
from stageline_runtime.graphs.padding import padded_size
from stageline_runtime.messages import GraphMode, PlanRow, SampledRow, SlotFill, StepPlan, TokenLogprobs


@dataclass(frozen=True, slots=True)
class NewToken:
    """A sampled token that belongs to a live request; `finished` when no more will follow."""

    request_id: str
    token: int
    finished: bool
    stopped: bool
    """Finished by a stop token rather than by length."""
    logprobs: TokenLogprobs | None = None
    failure: str | None = None
    """Why the request has failed instead; it is forgotten already."""


class Scheduler:
    """Requests, cohorts and the sequence of plans."""

    def __init__(
        self, ledger: SlotLedger, *, max_step_tokens: int, max_waiting: int, graphs: GraphMode = GraphMode.OFF
    ) -> None:
        self.ledger = ledger
        self._graphs = graphs
        self.max_step_tokens = max_step_tokens
        self.max_waiting = max_waiting
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Request] = {}
        self._cohorts: list[list[Request]] = [[] for _ in range(ledger.num_cohorts)]
        self._holder: dict[tuple[int, int], Request] = {}
        self._next_cohort = 0
        self._next_seq = 0
        self._feedback_through = -1
        self._unfinished: deque[int] = deque()
        self._filled: list[str] = []

    @property
    def num_waiting(self) -> int:
        """Requests that hold no slot yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_plans_in_flight(self) -> int:
        """Plans made whose completion is not known yet."""
        return len(self._unfinished)

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting or self._running)

    def cohort_sizes(self) -> tuple[int, ...]:
        """Running requests of each cohort."""
        return tuple(len(cohort) for cohort in self._cohorts)

    @property
    def can_add(self) -> bool:
        """Whether the waiting queue takes one more request."""
        return len(self._waiting) < self.max_waiting

    def add(self, request: Request) -> None:
        """Queue a request. Its id must be new."""
        assert self.can_add, "the waiting queue is full"
        assert request.request_id not in self._running, request.request_id
        self._waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Forget a request at once; rows of it that are in flight run dead. False when it isn't known."""
        running = self._running.get(request_id)
        if running is not None:
            self._release(running)
            return True
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return True
        return False

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can run before more tokens are known."""
        self._admit()
        self._even_out()
        for offset in range(self.ledger.num_cohorts):
            cohort = (self._next_cohort + offset) % self.ledger.num_cohorts
            rows, fills = self._rows_of(cohort, self._next_seq)
            if rows:
                self._next_cohort = (cohort + 1) % self.ledger.num_cohorts
                return self._plan(cohort, rows, fills, padded_size(sum(row.num_tokens for row in rows)))
        return None

    def just_filled(self) -> list[str]:
        """Requests whose first row was planned since the last call."""
        filled, self._filled = self._filled, []
        return filled

    def heartbeat(self) -> StepPlan:
        """A rowless plan that crosses all stages and computes nothing."""
        return self._plan(0, (), (), 1)

    def warm_up(self, num_tokens: int) -> StepPlan:
        """A dummy plan: `num_tokens` rows of nothing through all layers."""
        return self._plan(0, (), (), num_tokens, dummy=True)

    def complete(self, seq: int, rows: Iterable[SampledRow]) -> list[NewToken]:
        """Account for a finished plan. Rows of requests that ended meanwhile are dropped.

        Plans finish in the order they were made; anything else is a broken stage and asserts.
        """
        expected = self._unfinished.popleft() if self._unfinished else None
        assert seq == expected, f"plan {seq} finished, {expected} was next"
        tokens = []
        for row in rows:
            request = self._holder.get((row.slot, row.generation))
            if request is not None:
                tokens.append(self._accept(request, row))
        return tokens

    def _accept(self, request: Request, row: SampledRow) -> NewToken:
        token = row.token
        request.output.append(token)
        stopped = token in request.stop_token_ids
        finished = stopped or row.failure is not None or len(request.output) >= request.max_new_tokens
        if finished:
            self._release(request)
        return NewToken(request.request_id, token, finished, stopped, row.logprobs, row.failure)

    def _release(self, request: Request) -> None:
        del self._running[request.request_id]
        del self._holder[request.slot, request.generation]
        self._cohorts[request.cohort].remove(request)
        self.ledger.give_back(request.slot)

    def _admit(self) -> None:
        """Give slots to waiting requests, first come first served, each in the lightest cohort."""
        while self._waiting:
            cohort = self.ledger.lightest_cohort()
            if cohort is None:
                return
            request = self._waiting.popleft()
            request.cohort = cohort
            request.slot, request.generation = self.ledger.take(cohort, request.reserved_tokens)
            self._running[request.request_id] = request
            self._holder[request.slot, request.generation] = request
            self._cohorts[cohort].append(request)

    def _even_out(self) -> None:
        """Move requests from the largest cohort to the smallest until their sizes differ by one at most.

        A request keeps its slot: a cohort is who runs together, a slot is where its cache lies.
        """
        while True:
            largest = max(self._cohorts, key=len)
            smallest = min(self._cohorts, key=len)
            if len(largest) - len(smallest) < 2:
                return
            request = largest.pop()
            request.cohort = self._cohorts.index(smallest)
            request.changing_cohort = True
            smallest.append(request)

    def _rows_of(self, cohort: int, seq: int) -> tuple[tuple[PlanRow, ...], tuple[SlotFill, ...]]:
        """Rows for plan `seq`: decodes first (they are cheap and someone waits), then prefill within the budget."""
        budget = self.max_step_tokens
        rows: list[PlanRow] = []
        fills: list[SlotFill] = []
        for request in self._cohorts[cohort]:
            if budget and request.can_decode:
                rows.append(self._decode_row(request, seq))
                budget -= 1
        for request in self._cohorts[cohort]:
            if budget and request.prefill_pending:
                if not request.fill_sent:
                    fills.append(SlotFill(request.slot, request.generation, request.sampling))
                    request.fill_sent = True
                    self._filled.append(request.request_id)
                rows.append(row := self._prefill_row(request, seq, budget))
                budget -= row.num_tokens
        return tuple(sorted(rows, key=lambda row: row.slot)), tuple(fills)

    def _decode_row(self, request: Request, seq: int) -> PlanRow:
        position = request.decode_position
        self._feedback_through = max(self._feedback_through, request.last_sample_seq)
        request.samples_issued += 1
        request.last_sample_seq = seq
        request.changing_cohort = False
        return PlanRow(request.slot, request.generation, position, 1, (), need_sample=True)

    def _prefill_row(self, request: Request, seq: int, budget: int) -> PlanRow:
        start = request.scheduled_prompt_tokens
        tokens = request.prompt[start : start + budget]
        request.scheduled_prompt_tokens += len(tokens)
        last_chunk = request.prefill_pending == 0
        if last_chunk:
            request.samples_issued = 1
            request.last_sample_seq = seq
        return PlanRow(request.slot, request.generation, start, len(tokens), tokens, need_sample=last_chunk)

    def _plan(
        self,
        cohort: int,
        rows: tuple[PlanRow, ...],
        fills: tuple[SlotFill, ...],
        padded_tokens: int,
        *,
        dummy: bool = False,
    ) -> StepPlan:
        seq = self._next_seq
        self._next_seq += 1
        self._unfinished.append(seq)
        return StepPlan(
            seq=seq,
            cohort=cohort,
            fills=fills,
            rows=rows,
            padded_tokens=padded_tokens,
            feedback_through=self._feedback_through,
            feedback_posted=any(self._feeds_back(row) for row in rows),
            dummy=dummy,
            graph_mode=plan_graph_mode(self._graphs, rows, dummy=dummy),
        )

    def _feeds_back(self, row: PlanRow) -> bool:
        """Whether a later plan may take this row's token as input: not after the last token of a request."""
        if not row.need_sample:
            return False
        request = self._holder[row.slot, row.generation]
        return request.samples_issued < request.max_new_tokens
