"""The scheduler: makes the sequence of plans and accounts for their results. Pure: no clock, no socket, no torch.

`slot_assignment` decides which requests hold a slot and which step together, `row_selection` the rows of a plan. At
most one decode of a request is in flight and one more waits for its feedback, in every mode, because rows are made
in no other place. A verifying row is never in flight with another row of its request.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.engine.scheduling.row_selection import (
    FirstRow,
    SelectedRows,
    occasion_of,
    select_rows,
)
from stageline_runtime.engine.scheduling.slot_assignment import SlotAssignment
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import (
    BusProtocolError,
    Drafted,
    GraphMode,
    PlanRow,
    PromptReport,
    SampledRow,
    StepPlan,
    TokenLogprobs,
)
from stageline_runtime.plan_bus.step_plan import padded_part, plan_graph_mode
from stageline_runtime.speculation.speculation import Speculation


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


@dataclass(frozen=True, slots=True)
class ReportedPrompt:
    """Log probabilities of some of a live request's prompt tokens, each of which comes once and in order."""

    request_id: str
    report: PromptReport


class Scheduler:
    """Requests in, plans out, tokens back."""

    def __init__(
        self,
        ledger: SlotLedger,
        *,
        max_step_tokens: int,
        max_waiting: int,
        graphs: GraphMode = GraphMode.OFF,
        speculation: Speculation | None = None,
    ) -> None:
        """`speculation` None: no plan ever carries a draft."""
        self.ledger = ledger
        self.max_step_tokens = max_step_tokens
        self.max_waiting = max_waiting
        self.speculation = speculation
        self._graphs = graphs
        self._slots = SlotAssignment(ledger, has_draft_model=speculation is not None and speculation.has_draft_model)
        self._arrivals = 0
        self._next_seq = 0
        self.num_steps = 0
        """Plans with rows made so far. It stops rising when plans don't finish, since few are in flight at a time."""
        self._feedback_through = -1
        self._unfinished: deque[int] = deque()
        self._first_rows: list[FirstRow] = []

    @property
    def num_waiting(self) -> int:
        return len(self._slots.waiting)

    @property
    def num_running(self) -> int:
        return len(self._slots.running)

    @property
    def num_preemptions(self) -> int:
        return self._slots.num_preemptions

    @property
    def num_plans_in_flight(self) -> int:
        return len(self._unfinished)

    @property
    def has_requests(self) -> bool:
        return bool(self.num_waiting or self.num_running)

    def cohort_sizes(self) -> tuple[int, ...]:
        return self._slots.cohorts.sizes

    @property
    def queue_room(self) -> int:
        """How many more requests the waiting queue takes; those that lost their slots may have filled it beyond."""
        return max(0, self.max_waiting - self.num_waiting)

    @property
    def can_add(self) -> bool:
        return self.queue_room > 0

    def add(self, request: Request) -> None:
        """Queue a request. Its id must be new."""
        assert self.can_add, "the waiting queue is full"
        assert request.request_id not in self._slots.running, request.request_id
        request.arrival = self._arrivals
        self._arrivals += 1
        if self.speculation is not None:
            request.drafts = self.speculation.of_request(request.prompt, request.cache_salt)
        self._slots.waiting.add(request)

    def is_running(self, request_id: str) -> bool:
        return request_id in self._slots.running

    def abort(self, request_id: str) -> bool:
        """Drop a request at once; its rows in flight become stale. False when it isn't known."""
        running = self._slots.running.get(request_id)
        if running is not None:
            self._release(running)
            return True
        return self._slots.waiting.remove(request_id)

    def request_at(self, slot: int, generation: int) -> str | None:
        """Id of the request that owns these rows; None when they are stale."""
        request = self._slots.request_in(slot, generation)
        return None if request is None else request.request_id

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can run before more tokens are known."""
        cohorts = self._slots.cohorts
        self._slots.admit()
        cohorts.even_out()
        occasion = occasion_of(self._next_seq, self._unfinished, self.ledger.num_cohorts, self.num_running)
        for cohort in cohorts.turns():
            rows = select_rows(self._slots, cohort, self._next_seq, self.max_step_tokens, occasion)
            if rows.rows:
                cohorts.took_turn(cohort)
                return self._plan_of(cohort, rows)
        return None

    def first_rows(self) -> list[FirstRow]:
        first_rows, self._first_rows = self._first_rows, []
        return first_rows

    def heartbeat(self) -> StepPlan:
        """A rowless plan that crosses all stages and computes nothing."""
        return self._plan(0, SelectedRows(self._next_seq, 0), 1)

    def warm_up(self, num_tokens: int, draft_steps: int = 0) -> StepPlan:
        """A dummy plan: `num_tokens` empty rows through all layers, then `draft_steps` steps of the draft model."""
        return self._plan(0, SelectedRows(self._next_seq, 0, draft_steps=draft_steps), num_tokens, dummy=True)

    def take_drafts(self, drafted: Drafted) -> None:
        """What the last stage drafted after a plan; that of requests that ended or lost their slot is dropped."""
        if self.speculation is None:
            raise BusProtocolError(f"Drafted of plan {drafted.seq}, but no plan asks for drafts")
        self.speculation.note_draft_step(drafted.step_seconds)
        for row in drafted.rows:
            request = self._slots.request_in(row.slot, row.generation)
            if request is not None:
                request.take_drafts(row.position, row.token_ids)

    def take_reports(self, reports: Iterable[PromptReport]) -> list[ReportedPrompt]:
        """Account for a finished plan's prompt reports, before `complete`; returns those of requests that still run."""
        reported: list[ReportedPrompt] = []
        for report in reports:
            request = self._slots.request_in(report.slot, report.generation)
            if request is not None:
                report.check()
                if report.position != request.prompt_told:
                    expected = f"the next prompt token of slot {report.slot} is {request.prompt_told}"
                    raise BusProtocolError(f"PromptReport.position is {report.position}, but {expected}")
                request.prompt_told += report.num_tokens
                reported.append(ReportedPrompt(request.request_id, report))
        return reported

    def complete(self, seq: int, rows: Iterable[SampledRow]) -> list[NewToken]:
        """Account for a finished plan. Rows of requests that have since ended or lost their slot are dropped.

        Raises:
            BusProtocolError: plans don't finish in the order they were made, or a row has more tokens than it may.
        """
        expected = self._unfinished.popleft() if self._unfinished else None
        if seq != expected:
            raise BusProtocolError(f"StepDone.seq is {seq}, but {expected} is the next plan to finish")
        tokens: list[NewToken] = []
        for row in rows:
            request = self._slots.request_in(row.slot, row.generation)
            if request is not None:
                tokens += self._accept(request, row)
        return tokens

    def _accept(self, request: Request, row: SampledRow) -> Iterator[NewToken]:
        """The row's tokens, the last of which may end the request."""
        most = 1 + len(request.verifying or ())
        if not 1 <= row.num_sampled <= most or 0 < len(row.draft_logprobs) < row.num_sampled - 1:
            sizes = f"{row.num_sampled} with log probabilities of {len(row.draft_logprobs)} drafts"
            raise BusProtocolError(f"SampledRow.num_sampled of slot {row.slot} is {sizes}, of 1 to {most}")
        tokens = request.take(row)
        self._slots.note_computed(request)
        before = len(request.output) - len(tokens)
        for index, token in enumerate(tokens):
            is_newest = index == row.num_sampled - 1
            failure = row.failure if is_newest else None
            stopped = token in request.stop_token_ids
            finished = stopped or failure is not None or before + index + 1 >= request.max_new_tokens
            if finished:
                self._release(request)
            logprobs = row.logprobs if is_newest else (row.draft_logprobs[index] if row.draft_logprobs else None)
            yield NewToken(request.request_id, token, finished, stopped, logprobs, failure)
            if finished:
                return

    def _release(self, request: Request) -> None:
        self._slots.release(request)
        if self.speculation is not None:
            self.speculation.note_answer(request.prompt, request.cache_salt, request.output)

    def _plan_of(self, cohort: int, rows: SelectedRows) -> StepPlan:
        self.num_steps += 1
        self._first_rows += rows.first_rows
        self._feedback_through = max(self._feedback_through, rows.feedback_through)
        plan = self._plan(cohort, rows, padded_part(rows.rows, self.ledger.num_ranks))
        # Only now: what a plan's rows write can be read by later plans alone.
        for request in rows.requests:
            self._slots.note_computed(request)
        return plan

    def _plan(self, cohort: int, rows: SelectedRows, padded_tokens: int, *, dummy: bool = False) -> StepPlan:
        ordered = tuple(sorted(rows.rows, key=lambda row: row.slot))
        self._next_seq += 1
        self._unfinished.append(rows.seq)
        return StepPlan(
            seq=rows.seq,
            cohort=cohort,
            fills=tuple(rows.fills),
            rows=ordered,
            padded_tokens=padded_tokens,
            feedback_through=self._feedback_through,
            feedback_posted=any(self._feeds_back(row) for row in ordered),
            dummy=dummy,
            graph_mode=plan_graph_mode(self._graphs, ordered, dummy=dummy),
            tables=self.ledger.take_changes(),
            draft_steps=rows.draft_steps,
        )

    def _feeds_back(self, row: PlanRow) -> bool:
        """Whether a later plan may take this row's token as input: not after the last token of a request."""
        if not row.need_sample:
            return False
        request = self._slots.request_in(row.slot, row.generation)
        assert request is not None, f"a row of no request: {row}"
        return request.samples_issued < request.max_new_tokens
