"""The last stage's memory of how each slot's request samples, and the tensor work around the sampler.

Everything here can be rebuilt from token ids: inputs arrive in the plans' rows and fills, output is sampled here. The
state of a slot belongs to one generation; a row of another one, which runs dead, samples from its logits alone.

A verifying row is drawn at each of its tokens, with the parameters, the noise and the history that a decode row at that
position would have; it keeps what is drawn up to the first draw that is not the draft. So it says what decode rows one
by one would have said. Where history changes logits, each draw waits for the one before; elsewhere all are one draw.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stageline_runtime.guided.guide import Guide, GuideMaker
from stageline_runtime.plan_bus.messages import (
    BusProtocolError,
    PlanRow,
    RequestSampling,
    SampledRow,
    SlotFill,
    StepPlan,
    TokenLogprobs,
)
from stageline_runtime.sampling.adjustments import Placing, SeenTokens, adjust, stay
from stageline_runtime.sampling.exclusions import Tail, exclude
from stageline_runtime.sampling.logprobs import RawLogprobs
from stageline_runtime.sampling.sampler import sample
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH

_CHEAPEST = RequestSampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Draws:
    """How tokens are drawn where the logits are: on the CPU, or on a device by `sample_on_device`."""

    sample: Callable[[Tensor, list[RequestSampling], list[int]], Tensor]
    place: Placing


ON_CPU = Draws(sample, stay)


@dataclass(slots=True)
class SlotSampling:
    """One request's parameters and what it has said so far."""

    generation: int
    sampling: RequestSampling
    seen: SeenTokens | None
    guide: Guide | None
    tail: Tail | None = None
    is_plain: bool = field(init=False)
    """Whether it is drawn from the logits as they are, and nothing is told of it but its token."""

    def __post_init__(self) -> None:
        self.is_plain = is_plain(self.sampling) and not self.needs_history

    def take_inputs(self, position: int, token_ids: tuple[int, ...]) -> None:
        """Take inputs from `position` on; tokens behind the prompt's end are output generated before."""
        border = min(max(self.sampling.num_prompt_tokens - position, 0), len(token_ids))
        if self.seen is not None:
            self.seen.add_prompt(token_ids[:border])
            self.seen.add_output(token_ids[border:])
        if self.tail is not None:
            self.tail.add(token_ids[border:])
        if self.guide is not None and token_ids[border:]:
            self.guide.take(token_ids[border:])

    @property
    def needs_history(self) -> bool:
        """Whether what it has said changes what it says next."""
        return self.seen is not None or self.guide is not None or self.tail is not None

    def change(self, logits: Tensor, position: int, place: Placing = stay, *, masks: bool = True) -> None:
        """Bias, penalise and mask the request's logits `[vocab_size]` in place; the token to draw is at `position`.

        `masks` False: not by the grammar, which knows only what comes next.
        """
        adjust(logits, self.sampling, self.seen, place)
        if masks and self.guide is not None:
            self.guide.mask(logits, place)
        if self.sampling.has_exclusions:
            exclude(logits, self.sampling, position, self.tail, place)

    def take_output(self, token: int) -> None:
        if self.seen is not None:
            self.seen.add_output((token,))
        if self.tail is not None:
            self.tail.add((token,))
        if self.guide is not None:
            self.guide.take((token,))

    def draw_in_turn(self, row: PlanRow, logits: Tensor, draws: Draws) -> list[int]:
        """What a verifying row of a request with history keeps, drawn one by one from `[num_draws, vocab_size]`."""
        tokens: list[int] = []
        for index, expected in enumerate((*row.token_ids[1:], None)):
            position = row.position + index + 1
            self.change(logits[index], position, draws.place)
            token = int(draws.sample(logits[index : index + 1], [self.sampling], [position]))
            self.take_output(token)
            tokens.append(token)
            if token != expected or self.failure is not None:
                break
        return tokens

    @property
    def failure(self) -> str | None:
        return None if self.guide is None else self.guide.failure


def is_plain(sampling: RequestSampling) -> bool:
    """Whether a request is drawn from the logits as they are, and nothing is told of it but its token."""
    changes = sampling.depends_on_history or bool(sampling.logit_bias) or sampling.has_exclusions
    return not changes and sampling.num_top_logprobs is None


def slot_sampling(generation: int, sampling: RequestSampling, guide: Guide | None) -> SlotSampling:
    """A request that has said nothing yet, with the kinds of history that it needs."""
    return SlotSampling(
        generation,
        sampling,
        seen=SeenTokens() if sampling.has_penalties else None,
        guide=guide,
        tail=Tail(sampling.bad_words) if sampling.has_long_bad_words else None,
    )


class SamplingState:
    """Sampling parameters and history by slot; filled by the plan that gives the slot out."""

    def __init__(self, guides: GuideMaker | None = None, draws: Draws = ON_CPU) -> None:
        """`guides` is needed by requests with a schema only."""
        self._guides = guides
        self._draws = draws
        self._by_slot: dict[int, SlotSampling] = {}

    def accept(self, plan: StepPlan) -> None:
        """Take a plan's fills and prompt tokens; called once for each plan, in order, before `sample`."""
        for fill in plan.fills:
            self._fill(fill)
        for row in plan.rows:
            if row.is_chunk and (slot := self.live(row)) is not None:
                slot.take_inputs(row.position, row.token_ids)

    def sample(self, plan: StepPlan, logits: Tensor) -> tuple[tuple[SampledRow, ...], Tensor]:
        """Sample the plan's rows from logits `[num_draws, vocab_size]` float32, which are overwritten.

        Returns the rows for the engine and the feedback tensor `[num_sampled_rows, 2]` for the first stage.
        """
        rows = plan.sampled_rows
        place = self._draws.place
        slots = [self.live(row) for row in rows]
        if all(
            slot is not None and slot.is_plain and not row.num_drafts for row, slot in zip(rows, slots, strict=True)
        ):
            plain = _sample_plain(rows, [slot for slot in slots if slot is not None], logits, self._draws)
            return plain, place(_feedback(plain))
        logprobs = RawLogprobs(logits, top_counts(slots, rows), place)
        drawn, kept = _draw(rows, slots, logits, self._draws)
        read = [tensor.cpu() for tensor in logprobs.read(place(torch.tensor(drawn)))]
        sampled: list[SampledRow] = []
        first = 0
        for row, slot, tokens in zip(rows, slots, kept, strict=True):
            listed = [logprobs.of(first + index, read) for index in range(len(tokens))]
            sampled.append(_sampled_row(row, slot, tokens, listed))
            first += row.num_draws
        return tuple(sampled), place(_feedback(sampled))

    def take_drawn(self, plan: StepPlan, tokens: list[int]) -> tuple[tuple[SampledRow, ...], Tensor]:
        """As `sample`, for a plan of plain rows that verifies nothing, whose tokens have been drawn."""
        drawn = _drawn_plain(plan.sampled_rows, tokens)
        return drawn, self._draws.place(_feedback(drawn))

    def _fill(self, fill: SlotFill) -> None:
        sampling = fill.sampling
        guide = None
        if sampling.json_schema is not None:
            if self._guides is None:
                raise BusProtocolError(f"RequestSampling.json_schema of slot {fill.slot}: this stage has no grammars")
            guide = self._guides.start(sampling.json_schema)
        slot = self._by_slot[fill.slot] = slot_sampling(fill.generation, sampling, guide)
        slot.take_inputs(0, fill.cached_token_ids)

    def live(self, row: PlanRow) -> SlotSampling | None:
        """The state of a row's request; None where another request has its slot."""
        slot = self._by_slot.get(row.slot)
        return None if slot is None or slot.generation != row.generation else slot


def _sample_plain(
    rows: tuple[PlanRow, ...], slots: list[SlotSampling], logits: Tensor, draws: Draws
) -> tuple[SampledRow, ...]:
    """The sampled rows of a plan that verifies nothing, whose requests are all plain: of most plans."""
    positions = [row.position + row.num_tokens for row in rows]
    tokens: list[int] = draws.sample(logits, [slot.sampling for slot in slots], positions).tolist()
    return _drawn_plain(rows, tokens)


def _drawn_plain(rows: tuple[PlanRow, ...], tokens: list[int]) -> tuple[SampledRow, ...]:
    return tuple(SampledRow(row.slot, row.generation, token) for row, token in zip(rows, tokens, strict=True))


def _draw(
    rows: tuple[PlanRow, ...], slots: list[SlotSampling | None], logits: Tensor, draws: Draws
) -> tuple[list[int], list[list[int]]]:
    """Draw all rows and let their requests take what they keep: the `num_draws` draws, and each row's tokens."""
    sampling, positions = draws_of(slots, rows)
    first = 0
    for row, slot in zip(rows, slots, strict=True):
        if slot is not None and not _is_drawn_in_turn(row, slot):
            for index in range(first, first + row.num_draws):
                slot.change(logits[index], positions[index], draws.place)
        first += row.num_draws
    all_tokens: list[int] = draws.sample(logits, sampling, positions).tolist()
    kept: list[list[int]] = []
    first = 0
    for row, slot in zip(rows, slots, strict=True):
        end = first + row.num_draws
        if slot is not None and _is_drawn_in_turn(row, slot):
            tokens = slot.draw_in_turn(row, logits[first:end], draws)
            all_tokens[first : first + len(tokens)] = tokens
        else:
            tokens = _kept(row, slot, all_tokens[first:end])
        kept.append(tokens)
        first = end
    return all_tokens, kept


def _kept(row: PlanRow, slot: SlotSampling | None, tokens: list[int]) -> list[int]:
    """Of what was drawn for a row, the part that counts, which its request takes."""
    count = 1
    while count < len(tokens) and tokens[count - 1] == row.token_ids[count]:
        count += 1
    if slot is not None and slot.needs_history:
        slot.take_output(tokens[0])
    return tokens[:count]


def _is_drawn_in_turn(row: PlanRow, slot: SlotSampling) -> bool:
    return row.num_drafts > 0 and slot.needs_history


def _feedback(sampled: Sequence[SampledRow]) -> Tensor:
    """What the first stage is told of them, `[num_rows, 2]`: generation, newest token."""
    numbers: list[int] = []
    for row in sampled:
        numbers += (row.generation, row.token)
    if not numbers:
        return torch.empty(0, FEEDBACK_WIDTH, dtype=torch.int64)
    # `torch.tensor` would look at each number.
    return torch.frombuffer(array("q", numbers), dtype=torch.int64).view(-1, FEEDBACK_WIDTH)


def feedback_of_drawn(plan: StepPlan, tokens: list[int]) -> Tensor:
    """The same of a plan of plain rows that verifies nothing, whose tokens have been drawn."""
    drawn = zip(plan.sampled_rows, tokens, strict=True)
    return _feedback([SampledRow(row.slot, row.generation, token) for row, token in drawn])


def _sampled_row(
    row: PlanRow, slot: SlotSampling | None, tokens: list[int], listed: list[TokenLogprobs | None]
) -> SampledRow:
    return SampledRow(
        row.slot,
        row.generation,
        tokens[-1],
        listed[-1],
        slot.failure if slot else None,
        num_sampled=len(tokens),
        draft_logprobs=tuple(each for each in listed[:-1] if each is not None),
    )


def top_counts(slots: list[SlotSampling | None], rows: tuple[PlanRow, ...]) -> list[int | None]:
    """How many tokens to list with each draw's, None where nobody asks."""
    return [
        None if slot is None else slot.sampling.num_top_logprobs
        for slot, row in zip(slots, rows, strict=True)
        for _ in range(row.num_draws)
    ]


def draws_of(slots: list[SlotSampling | None], rows: tuple[PlanRow, ...]) -> tuple[list[RequestSampling], list[int]]:
    """Parameters of each draw, and the position of the token that it draws."""
    sampling: list[RequestSampling] = []
    positions: list[int] = []
    for slot, row in zip(slots, rows, strict=True):
        # A row without a slot runs dead, one drawn in turn is drawn later: here the cheapest draw will do.
        is_drawn = slot is not None and not _is_drawn_in_turn(row, slot)
        sampling += [slot.sampling if slot is not None and is_drawn else _CHEAPEST] * row.num_draws
        end = row.position + row.num_tokens
        positions += range(end - row.num_draws + 1, end + 1)
    return sampling, positions


def sampled_token_indices(plan: StepPlan) -> list[int]:
    """Index within the step of the tokens whose hidden states the sampled rows are drawn from."""
    indices: list[int] = []
    offset = 0
    for row in plan.rows:
        offset += row.num_tokens
        indices += range(offset - row.num_draws, offset)
    return indices
