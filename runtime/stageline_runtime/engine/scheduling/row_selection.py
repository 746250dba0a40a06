"""Selects the rows of a plan. Pure.

First, each member of the plan's cohort gets a decode row if its newest token is sampled or about to be, the most
senior first: decodes are cheap and a client waits for them. It gets a verifying row instead if its newest token is
known and drafts of the next ones may pay.

Then come prefill chunks within the token budget: of the cohort's own members, then of other cohorts' prompts, which
need no feedback and so no turn. Further chunks of a begun prompt always run. A first chunk runs if its own cohort's
plan is not made at once anyway, at most one a plan, so that prompts that arrive together don't crowd one.

A request's first row fills its slot: the cached part of its prefix is shared, and the rest is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stageline_runtime.engine.scheduling.request import Request
from stageline_runtime.engine.scheduling.slot_assignment import SlotAssignment
from stageline_runtime.plan_bus.messages import PlanRow, SlotFill


@dataclass(frozen=True, slots=True)
class FirstRow:
    request_id: str
    num_inputs: int
    cached_tokens: int
    """Of the inputs, how many came from the cache."""


@dataclass(slots=True)
class SelectedRows:
    """The rows and fills of plan `seq` as they come together."""

    seq: int
    budget: int
    rows: list[PlanRow] = field(default_factory=list)
    fills: list[SlotFill] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    """The requests with rows in the plan."""
    first_rows: list[FirstRow] = field(default_factory=list)
    feedback_through: int = -1
    """The newest plan whose feedback a row needs."""
    num_members: int = 1
    """Requests of the plan's cohort."""
    delayed_stages: int = 1
    """Stages that wait while the last one drafts: all, where other requests run."""
    draft_steps: int = 0
    reserve: Callable[[int, int], bool] = field(default=lambda _slot, _num_tokens: False)
    """Whether a slot can grow to this many tokens, including drafts, without preempting another request."""
    has_draft_model: bool = False
    slot_tokens: int = 0
    _asking: list[tuple[int, int]] = field(default_factory=list)
    """Slot and end of each row after which the last stage drafts."""

    def add_decode(self, request: Request) -> None:
        """One row with the request's newest token as input."""
        self._add_next(request, (), 0)

    def add_verification(self, request: Request, drafts: tuple[int, ...]) -> None:
        """One row of the request's newest token, which is known, and drafts of the tokens after it."""
        self._add_next(request, (request.output[-1], *drafts), len(drafts))
        request.verifying = drafts

    def _add_next(self, request: Request, ids: tuple[int, ...], num_drafts: int) -> None:
        at = request.decode_position
        asks = self._asks(request, at + 1 + num_drafts)
        row = PlanRow(request.slot, request.generation, at, 1 + num_drafts, ids, True, num_drafts, asks)
        self._add(row, request)
        # A verifying row needs no feedback; but feedback must not pile up at the first stage.
        self.feedback_through = max(self.feedback_through, request.last_sample_seq)
        request.samples_issued += 1
        request.last_sample_seq = self.seq
        request.out_of_turn = False

    def add_chunk(self, request: Request) -> None:
        """As many of the request's inputs as the budget allows; the last one samples."""
        start = request.scheduled_inputs
        tokens = request.inputs[start : start + self.budget]
        request.scheduled_inputs += len(tokens)
        is_last = request.prefill_pending == 0
        wants_drafts = is_last and self._asks(request, start + len(tokens))
        report_start, targets = request.report_of(start, start + len(tokens))
        row = PlanRow(
            request.slot,
            request.generation,
            start,
            len(tokens),
            tokens,
            is_last,
            wants_drafts=wants_drafts,
            report_start=report_start,
            report_targets=targets,
            report_top=request.sampling.num_top_prompt_logprobs or 0 if targets else 0,
        )
        self._add(row, request)
        if is_last:
            request.samples_issued += 1
            request.last_sample_seq = self.seq

    def _asks(self, request: Request, end: int) -> bool:
        """Whether the last stage is to draft after the request's row up to position `end`: as much as after any other
        row of the plan, for which all that ask need room.
        """
        steps = request.steps_to_draft(self.num_members, self.delayed_stages)
        most = max(self.draft_steps, steps)
        asking = [*self._asking, (request.slot, end)]
        unsure = asking if most > self.draft_steps else asking[-1:]
        if not steps or not all(self.reserve(slot, min(after + most, self.slot_tokens)) for slot, after in unsure):
            return False
        request.awaits_drafts = True
        self.draft_steps, self._asking = most, asking
        return True

    def _add(self, row: PlanRow, request: Request) -> None:
        self.rows.append(row)
        self.requests.append(request)
        self.budget -= row.num_tokens


@dataclass(frozen=True, slots=True)
class Occasion:
    """What the plans in flight mean for the next one."""

    awaits_through: int
    """The newest plan from which a decode row may await feedback at the first stage."""
    begins_for_others: bool
    """Whether a first chunk of another cohort's request may run in it."""

    def allows_decode(self, request: Request) -> bool:
        return request.can_decode and request.last_sample_seq <= self.awaits_through


def occasion_of(seq: int, unfinished: Sequence[int], num_stages: int, num_running: int) -> Occasion:
    """The occasion for plan `seq` behind those `unfinished`, in the order in which they were made.

    A plan that waits for feedback at the first stage delays all later ones. A single request delays no other, and
    with more requests than stages, feedback is back at the plan's turn. In between a decode is held back until its
    token is known, or until the plans made since keep the first stage busy for as long.

    With more requests than stages a new request shares its cohort, and its turn may be far off. Once every stage
    has a plan to run, the next plans are made one by one, and its first chunk need not wait for that turn.
    """
    is_full = len(unfinished) >= num_stages
    through = seq - 1
    if unfinished and 1 < num_running <= num_stages:
        through = unfinished[-num_stages] if is_full else unfinished[0] - 1
    return Occasion(through, is_full and num_running > num_stages)


def select_rows(slots: SlotAssignment, cohort: int, seq: int, budget: int, occasion: Occasion) -> SelectedRows:
    """Choose rows of at most `budget` tokens for plan `seq` in the turn of `cohort`; there may be none."""
    members = slots.cohorts.members(cohort)
    delayed_stages = 1 if len(slots.running) == 1 else slots.ledger.num_cohorts
    plan = SelectedRows(
        seq,
        budget,
        num_members=len(members),
        delayed_stages=delayed_stages,
        reserve=slots.grow_for_drafts,
        has_draft_model=slots.has_draft_model,
        slot_tokens=slots.ledger.slot_tokens,
    )
    for request in members:
        speculates = request.drafts is not None and plan.budget > 0 and _speculate(slots, request, plan, len(members))
        decodes = plan.budget > 0 and not speculates and occasion.allows_decode(request)
        if decodes and slots.grow(request, request.decode_position + 1):
            plan.add_decode(request)
    for request in members:
        # A member may just have lost its slot to one before it.
        if plan.budget and request.request_id in slots.running and request.prefill_pending:
            _begin_or_go_on(slots, request, plan)
    for request in _prompts_of_others(slots, cohort) if plan.budget else ():
        if plan.budget and (request.fill_sent or (plan.rows and occasion.begins_for_others and not plan.fills)):
            _begin_or_go_on(slots, request, plan)
            request.out_of_turn = True
    return plan


def _speculate(slots: SlotAssignment, request: Request, plan: SelectedRows, num_rows: int) -> bool:
    """Give the request a verifying row, or keep it out of this plan for one; False when it is to decode normally.

    While its newest token is in flight and the known tokens have a continuation, it waits, because a verifying row
    consists of known tokens. Drafts never cost another request its slot.
    """
    # The other members' decode rows come first.
    drafts = request.propose(num_rows, plan.budget - num_rows)
    if not drafts:
        return False
    if request.samples_in_flight:
        return True
    if not slots.grow_for_drafts(request.slot, request.decode_position + 1 + len(drafts)):
        return False
    plan.add_verification(request, drafts)
    return True


def _prompts_of_others(slots: SlotAssignment, cohort: int) -> list[Request]:
    pending = [each for each in slots.running.values() if each.cohort != cohort and each.prefill_pending]
    return sorted(pending, key=lambda request: (not request.fill_sent, request.seniority))


def _begin_or_go_on(slots: SlotAssignment, request: Request, plan: SelectedRows) -> None:
    """The request's next chunk, before its first one the slot's fill."""
    if not request.fill_sent:
        _fill(slots, request, plan)
    plan.add_chunk(request)


def _fill(slots: SlotAssignment, request: Request, plan: SelectedRows) -> None:
    """Fill the request's slot, with its longest prefix that earlier plans leave in the cache."""
    cached = request.scheduled_inputs = slots.ledger.share_more(request.slot, request.reusable_inputs)
    request.fill_sent = True
    needs_ids = request.sampling.depends_on_history or plan.has_draft_model
    ids = request.inputs[:cached] if needs_ids else ()
    plan.fills.append(SlotFill(request.slot, request.generation, request.sampling, cached, ids))
    if not request.started:
        request.started = True
        plan.first_rows.append(FirstRow(request.request_id, len(request.inputs), cached))
