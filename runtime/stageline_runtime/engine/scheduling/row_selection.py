"""Which rows go into a plan. Pure.

First a decode row for each member of the plan's cohort whose newest token is sampled or about to be (they are cheap and
someone waits), the most senior first, or a verifying row where its newest token is known and drafts of the next ones
may pay; then prefill chunks within the token budget: of the cohort's own members, and then of the prompts of others,
which need no feedback and so no turn: further chunks of those begun always; a first chunk where its own cohort's plan
is not made at once anyway, at most one a plan, so that prompts that come together don't crowd one. A request's first
row fills its slot: what is known of its beginning is kept there or copied from another slot, and the rest is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stageline_runtime.engine.scheduling.request import Guess, Request
from stageline_runtime.engine.scheduling.slot_assignment import SlotAssignment
from stageline_runtime.plan_bus.messages import PlanRow, SlotFill

LEAST_CHANCE = 0.01
"""Of a chain's row to count: a broken one costs stages that had nothing else to do their time, and little more."""
LEAST_CHANCE_BESIDE_OTHERS = 0.05
"""Where another request's row may have to wait for the end of it."""


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
    """Whose rows they are."""
    first_rows: list[FirstRow] = field(default_factory=list)
    feedback_through: int = -1
    """The newest plan whose feedback a row needs."""
    num_members: int = 1
    """Requests of the plan's cohort."""
    delayed_stages: int = 1
    """Stages that wait while the last one drafts: all, where other requests run."""
    draft_steps: int = 0

    def add_decode(self, request: Request) -> None:
        """One row whose input is the request's newest token."""
        position = request.decode_position
        self._add(PlanRow(request.slot, request.generation, position, 1, (), True, 0, self._asks(request)), request)
        self.feedback_through = max(self.feedback_through, request.last_sample_seq)
        request.samples_issued += 1
        request.last_sample_seq = self.seq
        request.out_of_turn = False

    def add_verification(self, request: Request, drafts: tuple[int, ...]) -> None:
        """One row of the request's newest token, which is known, and drafts of what comes after it."""
        guess = Guess(self.seq, request.decode_position, (request.output[-1], *drafts))
        self._add_guess(request, guess, wants_drafts=self._asks(request))
        request.samples_issued += 1
        request.last_sample_seq = self.seq
        request.out_of_turn = False

    def add_chained(self, request: Request, token_ids: tuple[int, ...]) -> None:
        """A verifying row of a guessed newest token and drafts, before the guesses in flight are back."""
        self._add_guess(request, Guess(self.seq, request.chain_position, token_ids, is_chained=True))

    def _add_guess(self, request: Request, guess: Guess, *, wants_drafts: bool = False) -> None:
        ids = guess.token_ids
        self._add(
            PlanRow(
                request.slot, request.generation, guess.position, len(ids), ids, True, guess.num_drafts, wants_drafts
            ),
            request,
        )
        # It needs no feedback; but what has come must not pile up at the first stage.
        self.feedback_through = max(self.feedback_through, request.known_seq)
        request.guesses.append(guess)

    def add_chunk(self, request: Request) -> None:
        """As many of the request's inputs as the budget allows; the last one samples."""
        start = request.scheduled_inputs
        tokens = request.inputs[start : start + self.budget]
        request.scheduled_inputs += len(tokens)
        is_last = request.prefill_pending == 0
        wants_drafts = is_last and self._asks(request)
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

    def _asks(self, request: Request) -> bool:
        """Whether the last stage is to draft after the request's row."""
        steps = request.ask_for_drafts(self.num_members, self.delayed_stages)
        self.draft_steps = max(self.draft_steps, steps)
        return steps > 0

    def _add(self, row: PlanRow, request: Request) -> None:
        self.rows.append(row)
        self.requests.append(request)
        self.budget -= row.num_tokens


@dataclass(frozen=True, slots=True)
class Occasion:
    """What the plans in flight mean for the next one."""

    awaits_through: int
    """The newest plan whose feedback a decode row may wait for at the first stage."""
    begins_for_others: bool
    """Whether a first chunk of another cohort's request may run in it."""

    def allows_decode(self, request: Request) -> bool:
        return request.can_decode and request.last_sample_seq <= self.awaits_through


def occasion_of(
    seq: int, unfinished: Sequence[int], num_stages: int, num_running: int, *, holds_back: bool = True
) -> Occasion:
    """The occasion for plan `seq` behind those `unfinished`, in the order in which they were made.

    A plan that waits for feedback at the first stage keeps all behind it waiting. A request alone keeps nobody waiting,
    and with more of them than stages, feedback is back when it is the plan's turn. In between a decode is held back
    until its token is known, or until the plans made since keep the first stage busy for as long: unless tokens are
    told so late that it would lose by it (`holds_back` False).

    With more requests than stages a newcomer shares its cohort, whose turn may be far off. Once every stage has a plan
    to run, the next ones are made one by one, and its first chunk need not wait for that turn.
    """
    is_full = len(unfinished) >= num_stages
    through = seq - 1
    if holds_back and unfinished and 1 < num_running <= num_stages:
        through = unfinished[-num_stages] if is_full else unfinished[0] - 1
    return Occasion(through, is_full and num_running > num_stages)


def select_rows(slots: SlotAssignment, cohort: int, seq: int, budget: int, occasion: Occasion) -> SelectedRows:
    """Choose rows of at most `budget` tokens for plan `seq`, whose turn is `cohort`'s; there may be none."""
    members = slots.cohorts.members(cohort)
    delayed_stages = 1 if len(slots.running) == 1 else slots.ledger.num_cohorts
    plan = SelectedRows(seq, budget, num_members=len(members), delayed_stages=delayed_stages)
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


def select_chained(slots: SlotAssignment, seq: int, budget: int) -> SelectedRows:
    """A row that makes a chain longer, alone in its plan: the chain likeliest to hold; there may be none."""
    plan = SelectedRows(seq, budget)
    least = LEAST_CHANCE if len(slots.running) == 1 else LEAST_CHANCE_BESIDE_OTHERS
    chains = [request for request in slots.running.values() if request.chain_chance >= least]
    for request in sorted(chains, key=lambda each: each.chain_chance, reverse=True):
        token_ids = request.extend_chain()[:budget]
        if len(token_ids) > 1 and slots.ledger.grow(request.slot, request.chain_position + len(token_ids)):
            plan.add_chained(request, token_ids)
            return plan
    return plan


def _speculate(slots: SlotAssignment, request: Request, plan: SelectedRows, num_rows: int) -> bool:
    """Give the request a verifying row, or keep it out of this plan for one; False when it is to decode as others do.

    While its newest token is on the way and what is known has a continuation, it waits: a verifying row is made of
    known tokens. Drafts never cost another request its slot.
    """
    # The other members' decode rows come first.
    depth = slots.ledger.num_cohorts if len(slots.running) == 1 else 1
    drafts = request.propose(num_rows, plan.budget - num_rows, depth)
    if not drafts:
        return False
    if request.samples_in_flight:
        return True
    if not slots.ledger.grow(request.slot, request.decode_position + 1 + len(drafts)):
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
    """Fill the request's slot, with the longest beginning of it that earlier plans leave in any slot."""
    copy_from = None
    known, holder = slots.ledger.beginning_of(request.slot, request.reusable_inputs, request.cache_salt)
    if known > request.scheduled_inputs:
        copy_from, request.scheduled_inputs = holder, known
    request.fill_sent = True
    cached = request.scheduled_inputs
    ids = request.inputs[:cached] if request.sampling.depends_on_history else ()
    plan.fills.append(SlotFill(request.slot, request.generation, request.sampling, cached, copy_from, ids))
    if not request.started:
        request.started = True
        plan.first_rows.append(FirstRow(request.request_id, len(request.inputs), cached))
