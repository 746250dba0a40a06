"""What one step of the pipeline is: everything a stage sends, receives or computes for it follows from its plan alone.

Beside the messages stand the rules for a plan's shapes: padding, graph mode, the unit that the KV cache is counted in,
and the part that one rank of several runs. The engine makes plans by them, and stages provide for every shape that they
allow. Others import the messages from `messages`.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Final, assert_never

import msgspec

BLOCK_TOKENS = 16
"""The unit that KV cache is counted in, in all layers of all stages, whatever a stage's memory looks like."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Anything said on the plan bus."""


class RequestSampling(Message, frozen=True):
    """How one request's tokens are drawn: made when the engine admits it, carried by the scheduler, sent once with the
    fill of its slot, read by the sampler. The defaults change nothing.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    seed: int = 0
    choice: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, addend), each id once."""
    num_top_logprobs: int | None = None
    """How many tokens to list with each sampled one; None asks for no log probabilities."""
    json_schema: str | None = None
    """What the output is held to, as `SamplingParams.guide` writes it: a JSON schema, or, after a mark, a regular
    expression or a grammar. Checked by the engine."""
    num_prompt_tokens: int = 0
    """The border between prompt and output: input tokens at this position and after count as generated."""
    min_tokens: int = 0
    """None of `end_token_ids` is drawn before so many tokens are generated."""
    end_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """All that may be drawn; empty: everything."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output never holds."""
    num_top_prompt_logprobs: int | None = None
    """How many tokens to list with each of the prompt's; None asks for no log probabilities of the prompt."""

    @property
    def has_penalties(self) -> bool:
        """Whether the request's earlier tokens change its logits."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def depends_on_history(self) -> bool:
        """Whether the last stage samples by more than the newest hidden state."""
        return self.has_penalties or self.has_long_bad_words or self.json_schema is not None

    @property
    def has_long_bad_words(self) -> bool:
        """Whether a banned word has several tokens, so that those before decide about the next."""
        return any(len(word) > 1 for word in self.bad_words)

    @property
    def has_exclusions(self) -> bool:
        return self.min_tokens > 0 or bool(self.allowed_token_ids) or bool(self.bad_words)


class SlotBlocks(Message, frozen=True):
    """From part `start` on, a slot's positions lie in these blocks of the KV cache, and in no others."""

    slot: int
    start: int
    blocks: tuple[int, ...]
    are_new: bool = False
    """Whether what they hold is void; otherwise earlier plans put there what the slot is to have there."""


class SlotFill(Message, frozen=True):
    """Assigns a slot to a request under a new generation; the previous holder's state is void."""

    slot: int
    generation: int
    sampling: RequestSampling
    cached_tokens: int = 0
    """Number of the request's first inputs with cached keys and values: no row will carry them."""
    cached_token_ids: tuple[int, ...] = ()
    """These inputs, when sampling depends on earlier tokens, or a draft model needs them."""


class PlanRow(Message, frozen=True):
    """One request's part of a step.

    `token_ids` holds the input of a prefill chunk. If it is empty this is a decode row, and stage 0 takes its single
    input token from feedback. `position` is the position of the first input token. A verifying row (`num_drafts` above
    0) holds the request's newest token and then drafts. The last stage samples after each of them, and keeps the draws
    up to the first draw that differs from the draft.
    """

    slot: int
    generation: int
    position: int
    num_tokens: int
    token_ids: tuple[int, ...]
    need_sample: bool
    num_drafts: int = 0
    wants_drafts: bool = False
    """Whether the last stage drafts the tokens after the one that it samples."""
    report_start: int = 0
    """Of a chunk: which of its tokens is the first that `report_targets` follows."""
    report_targets: tuple[int, ...] = ()
    """Prompt tokens for which the last stage reports log probabilities: each follows a token of the chunk, from
    `report_start` on. The last one may be the first token of the next chunk, so the plan holds it."""
    report_top: int = 0
    """How many of the likeliest tokens are reported with each."""

    @property
    def is_chunk(self) -> bool:
        """Whether its tokens are new to the last stage: inputs, which sampling didn't draw."""
        return bool(self.token_ids) and not self.num_drafts

    @property
    def num_draws(self) -> int:
        """How many tokens the last stage draws for it, at most."""
        return self.num_drafts + 1 if self.need_sample else 0


Count = Annotated[int, msgspec.Meta(ge=0)]
"""Not negative, which decoding checks."""


class BusProtocolError(Exception):
    """The other side sent something that the protocol doesn't allow; the message names the field and the value."""


class GraphMode(enum.StrEnum):
    """How a plan's layers run. `FULL`: whole layers captured; `PIECEWISE`: all but attention; `OFF`: nothing."""

    OFF = "off"
    PIECEWISE = "piecewise"
    FULL = "full"


class StepPlan(Message, frozen=True, dict=True):
    """One step of one cohort. Everything a stage sends or receives for it follows from this alone.

    `feedback_through`: before stage 0 builds its inputs it applies the feedback of every plan up to this `seq`.
    `feedback_posted`: the last stage sends stage 0 the sampled rows of this plan. `draft_steps`: after it has reported
    the sampled tokens, the last stage drafts so many tokens for each row that wants some. It reports them in one
    `Drafted`; 0 where no row wants any. A dummy plan's draft steps belong to no row and are only timed. Tables come
    first, then fills, each in their order, then rows. Derived values are computed once per plan.
    """

    seq: int
    cohort: int
    fills: tuple[SlotFill, ...]
    rows: tuple[PlanRow, ...]
    padded_tokens: int
    feedback_through: int
    feedback_posted: bool
    dummy: bool
    """A warm-up step: `padded_tokens` rows of nothing run through all layers and touch no slot."""
    graph_mode: GraphMode = GraphMode.OFF
    """Decided by the engine alone (`plan_graph_mode`), so that all stages run a plan alike."""
    tables: tuple[SlotBlocks, ...] = ()
    """What has changed in the slots' tables of blocks. A block that is new to a table is written before it is read."""
    draft_steps: int = 0
    report_times: bool = False
    """Each stage answers with `StepTimes` once it has run it: a request of this plan is being traced."""

    @cached_property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def is_heartbeat(self) -> bool:
        """A rowless plan that no stage computes: it only shows that every stage still answers."""
        return not self.rows and not self.dummy

    @cached_property
    def num_chunks(self) -> int:
        """How many rows bring tokens that are new to the last stage."""
        return sum(row.is_chunk for row in self.rows)

    @cached_property
    def sampled_rows(self) -> tuple[PlanRow, ...]:
        """The rows that the last stage samples, in plan order; also the order of the feedback tensor."""
        return tuple(row for row in self.rows if row.need_sample)

    @cached_property
    def verifies_drafts(self) -> bool:
        return any(row.num_drafts for row in self.rows)

    @property
    def reports_prompts(self) -> bool:
        """Whether the last stage is to report log probabilities of a prompt."""
        return any(row.report_targets for row in self.rows)

    @property
    def drafted_rows(self) -> tuple[PlanRow, ...]:
        """The rows for which the last stage drafts next tokens, in plan order."""
        return tuple(row for row in self.rows if row.wants_drafts)


def plan_graph_mode(graphs: GraphMode, rows: Sequence[PlanRow], *, dummy: bool) -> GraphMode:
    """The mode of a plan with these rows in a group that captures up to `graphs`.

    Whole layers are captured for single-token rows alone, because only their attention has one shape for every
    context; a plan that computes nothing (a heartbeat) runs nothing captured.
    """
    if not rows and not dummy:
        return GraphMode.OFF
    match graphs:
        case GraphMode.OFF | GraphMode.PIECEWISE:
            return graphs
        case GraphMode.FULL:
            return GraphMode.FULL if all(row.num_tokens == 1 for row in rows) else GraphMode.PIECEWISE
        case _:
            assert_never(graphs)


def padded_size(num_tokens: int) -> int:
    """Rows a plan is padded to: few distinct sizes, so that shapes (and rounding) repeat. 1, 2, 4, then eights."""
    for size in (1, 2, 4):
        if num_tokens <= size:
            return size
    return (num_tokens + 7) // 8 * 8


LARGEST_CAPTURED_STEP: Final = 256
"""Larger plans with chunks run eagerly: their work takes longer than its launches, and captured sizes double, so that
padding would take up to twice as long. Plans of single tokens have captured sizes of their own (`decode_sizes`)."""


def captured_step(max_step_tokens: int) -> int:
    """Tokens of the largest plan with chunks that is captured, where plans have up to `max_step_tokens`."""
    return min(padded_size(max_step_tokens), LARGEST_CAPTURED_STEP)


def decode_sizes(most_rows: int) -> tuple[int, ...]:
    """All sizes that plans of up to `most_rows` single-token rows are padded to."""
    return tuple(sorted({padded_size(rows) for rows in range(1, most_rows + 1)}))


def rows_per_cohort(num_slots: int, num_cohorts: int) -> int:
    """Most requests that decode in one plan: cohorts differ in size by one at most."""
    return -(-num_slots // num_cohorts)


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


# Where requests belong to one rank of a stage each (experts over ranks), each rank runs its part of a plan. Which rank
# a request belongs to follows from its slot alone, and all that a rank does from the plan.


def rank_of_slot(slot: int, ranks: int) -> int:
    """The rank that holds what lies in a slot."""
    return slot % ranks


def padded_part(rows: Iterable[PlanRow], ranks: int) -> int:
    """How many rows every rank's part of a plan with these `rows` is padded to: the largest part decides."""
    if ranks == 1:
        return padded_size(sum(row.num_tokens for row in rows))
    tokens: Counter[int] = Counter()
    for row in rows:
        tokens[rank_of_slot(row.slot, ranks)] += row.num_tokens
    return padded_size(max(tokens.values(), default=1))


def plan_of_rank(plan: StepPlan, rank: int, ranks: int) -> StepPlan:
    """What `rank` runs of a plan: its own rows, fills and tables, on as many padded rows as every other rank.

    A rank without rows runs the plan as a dummy, and so takes part in whatever the ranks exchange within it.
    """
    if ranks == 1:
        return plan
    rows = tuple(row for row in plan.rows if rank_of_slot(row.slot, ranks) == rank)
    return msgspec.structs.replace(
        plan,
        fills=tuple(fill for fill in plan.fills if rank_of_slot(fill.slot, ranks) == rank),
        tables=tuple(table for table in plan.tables if rank_of_slot(table.slot, ranks) == rank),
        rows=rows,
        feedback_posted=plan.feedback_posted and any(row.need_sample for row in rows),
        dummy=plan.dummy or (bool(plan.rows) and not rows),
        draft_steps=plan.draft_steps if plan.dummy or any(row.wants_drafts for row in rows) else 0,
    )
