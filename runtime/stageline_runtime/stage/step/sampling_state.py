"""The last stage's memory of how each slot's request samples, and the tensor work around the sampler.

Everything here can be rebuilt from token ids: inputs arrive in the plans' rows and fills, output is sampled here. The
state of a slot belongs to one generation; a stale row of another one samples from its logits alone.

A verifying row is drawn at each of its tokens, with the parameters, the noise and the history of a decode row at that
position. It keeps the draws up to the first one that differs from the draft. So its output equals that of single decode
rows. Where history changes logits, each draw waits for the one before; elsewhere all are one draw.

Drawn tokens stay on the device for feedback, and the host reads them later. Two kinds of plans wait for the device. One
verifies drafts: the host decides how many hold. The other has a request with a next token that depends on its output
(penalties, a grammar). That output was sampled at least one plan of its cohort earlier, so its copy is mostly done.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from stageline_runtime.accelerator.cpu import HOST
from stageline_runtime.accelerator.protocol import ComputeDevice
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
from stageline_runtime.sampling.device_sampler import sample_on_device
from stageline_runtime.sampling.exclusions import Tail, exclude
from stageline_runtime.sampling.logprobs import RawLogprobs
from stageline_runtime.stage.step.host_tensors import int64s
from stageline_runtime.stage.step.pending_rows import PendingRows

_CHEAPEST = RequestSampling(temperature=0.0)


@dataclass(slots=True)
class SlotSampling:
    """One request's parameters and its output so far."""

    generation: int
    sampling: RequestSampling
    seen: SeenTokens | None
    guide: Guide | None
    tail: Tail | None = None
    needs_history: bool = field(init=False)
    """Whether its output changes what it draws next."""
    is_plain: bool = field(init=False)
    """Whether the token is drawn from the unmodified logits, and only the token is reported."""

    def __post_init__(self) -> None:
        self.needs_history = self.seen is not None or self.guide is not None or self.tail is not None
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

    def change(self, logits: Tensor, position: int, place: Placing = stay, *, masks: bool = True) -> None:
        """Bias, penalise and mask the request's logits `[vocab_size]` in place; the token to draw is at `position`.

        `masks` False: without the grammar, which knows only the next position.
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

    def draw_in_turn(self, row: PlanRow, logits: Tensor, place: Placing) -> list[int]:
        """What a verifying row of a request with history keeps, drawn one by one from `[num_draws, vocab_size]`."""
        tokens: list[int] = []
        for index, expected in enumerate((*row.token_ids[1:], None)):
            position = row.position + index + 1
            self.change(logits[index], position, place)
            token = int(sample_on_device(logits[index : index + 1], [self.sampling], [position], place))
            self.take_output(token)
            tokens.append(token)
            if token != expected or self.failure is not None:
                break
        return tokens

    @property
    def failure(self) -> str | None:
        return None if self.guide is None else self.guide.failure


def is_plain(sampling: RequestSampling) -> bool:
    """Whether a request's token is drawn from the unmodified logits, and only the token is reported."""
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

    def __init__(self, guides: GuideMaker | None = None, device: ComputeDevice = HOST) -> None:
        """`guides` is needed by requests with a schema only."""
        self._guides = guides
        self._device = device
        self._by_slot: dict[int, SlotSampling] = {}
        self._newest: dict[int, PendingRows] = {}
        """By slot: the newest sample of a request that needs its history."""

    def accept(self, plan: StepPlan) -> None:
        """Take a plan's fills and prompt tokens; called once for each plan, in order, before `sample`."""
        for fill in plan.fills:
            self._fill(fill)
        for row in plan.rows:
            if row.is_chunk and (slot := self.live(row)) is not None:
                slot.take_inputs(row.position, row.token_ids)

    def sample(self, plan: StepPlan, logits: Tensor) -> tuple[PendingRows, Tensor]:
        """Sample the plan's rows from logits `[num_draws, vocab_size]` float32, which are overwritten.

        Returns the rows for the engine and the feedback for the first stage: newest tokens `[num_sampled_rows, 1]`.
        """
        rows = plan.sampled_rows
        slots = [self.live(row) for row in rows]
        special = [(index, slot) for index, slot in enumerate(slots) if slot is not None and not slot.is_plain]
        for index, _ in special:
            if (earlier := self._newest.pop(rows[index].slot, None)) is not None:
                earlier.rows()
        if plan.verifies_drafts:
            return self._verify(rows, slots, logits)
        place = self._device.place
        logprobs = RawLogprobs(logits, _top_counts(special), place)
        positions = [row.position + row.num_tokens for row in rows]
        for index, slot in special:
            slot.change(logits[index], positions[index], place)
        # A row without a slot is stale: the cheapest draw will do.
        sampling = [_CHEAPEST if slot is None else slot.sampling for slot in slots]
        tokens = sample_on_device(logits, sampling, positions, place)
        read = partial(_drawn_rows, rows, special, logprobs)
        drawn = PendingRows(self._device, (tokens, *logprobs.read(tokens)), read)
        for index, slot in special:
            if slot.needs_history:
                self._newest[rows[index].slot] = drawn
        return drawn, tokens.unsqueeze(1)

    def take_drawn(self, plan: StepPlan, tokens: list[int]) -> tuple[PendingRows, Tensor]:
        """Like `sample`, for a plan of plain rows that verifies nothing; its tokens have been drawn already."""
        rows = plan.sampled_rows
        drawn = tuple(SampledRow(row.slot, row.generation, token) for row, token in zip(rows, tokens, strict=True))
        return PendingRows.known(drawn), self._device.place(int64s(tokens)).unsqueeze(1)

    def _verify(
        self, rows: tuple[PlanRow, ...], slots: list[SlotSampling | None], logits: Tensor
    ) -> tuple[PendingRows, Tensor]:
        """As `sample`, for a plan that verifies drafts."""
        place = self._device.place
        of_draws = [slot for slot, row in zip(slots, rows, strict=True) for _ in range(row.num_draws)]
        logprobs = RawLogprobs(logits, _top_counts(enumerate(of_draws)), place)
        drawn, kept = _draw(rows, slots, logits, place)
        read = [tensor.cpu() for tensor in logprobs.read(place(int64s(drawn)))]
        sampled: list[SampledRow] = []
        first = 0
        for row, slot, tokens in zip(rows, slots, kept, strict=True):
            listed = [logprobs.of(first + index, read) for index in range(len(tokens))]
            sampled.append(_sampled_row(row, slot, tokens, listed))
            first += row.num_draws
        newest = place(int64s([row.token for row in sampled]))
        return PendingRows.known(tuple(sampled)), newest.unsqueeze(1)

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


def _top_counts(draws: Iterable[tuple[int, SlotSampling | None]]) -> dict[int, int]:
    """How many tokens to list with each draw, for draws with requests that ask for some."""
    asked = ((index, slot.sampling.num_top_logprobs) for index, slot in draws if slot is not None)
    return {index: count for index, count in asked if count is not None}


def _drawn_rows(
    rows: tuple[PlanRow, ...], special: list[tuple[int, SlotSampling]], logprobs: RawLogprobs, read: Sequence[Tensor]
) -> tuple[SampledRow, ...]:
    """The rows of a plan that verifies nothing, which their requests take; `read`: the tokens, and log probabilities.

    `special`: requests that aren't plain, with the place of their rows.
    """
    tokens: list[int] = read[0].tolist()
    sampled = [SampledRow(row.slot, row.generation, token) for row, token in zip(rows, tokens, strict=True)]
    for index, slot in special:
        slot.take_output(tokens[index])
        sampled[index] = _sampled_row(rows[index], slot, [tokens[index]], [logprobs.of(index, read[1:])])
    return tuple(sampled)


def _draw(
    rows: tuple[PlanRow, ...], slots: list[SlotSampling | None], logits: Tensor, place: Placing
) -> tuple[list[int], list[list[int]]]:
    """Draw all rows and let their requests take what they keep: the `num_draws` draws, and each row's tokens."""
    sampling, positions = draws_of(slots, rows)
    first = 0
    for row, slot in zip(rows, slots, strict=True):
        if slot is not None and not _is_drawn_in_turn(row, slot):
            for index in range(first, first + row.num_draws):
                slot.change(logits[index], positions[index], place)
        first += row.num_draws
    all_tokens: list[int] = sample_on_device(logits, sampling, positions, place).tolist()
    kept: list[list[int]] = []
    first = 0
    for row, slot in zip(rows, slots, strict=True):
        end = first + row.num_draws
        if slot is not None and _is_drawn_in_turn(row, slot):
            tokens = slot.draw_in_turn(row, logits[first:end], place)
            all_tokens[first : first + len(tokens)] = tokens
        else:
            tokens = _kept(row, slot, all_tokens[first:end])
        kept.append(tokens)
        first = end
    return all_tokens, kept


def _kept(row: PlanRow, slot: SlotSampling | None, tokens: list[int]) -> list[int]:
    """The part of a row's drawn tokens that counts and that its request accepts."""
    count = 1
    while count < len(tokens) and tokens[count - 1] == row.token_ids[count]:
        count += 1
    if slot is not None and slot.needs_history:
        slot.take_output(tokens[0])
    return tokens[:count]


def _is_drawn_in_turn(row: PlanRow, slot: SlotSampling) -> bool:
    return row.num_drafts > 0 and slot.needs_history


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


def draws_of(slots: list[SlotSampling | None], rows: tuple[PlanRow, ...]) -> tuple[list[RequestSampling], list[int]]:
    """Parameters of each draw, and the position of the token that it draws."""
    sampling: list[RequestSampling] = []
    positions: list[int] = []
    for slot, row in zip(slots, rows, strict=True):
        # A row without a slot is stale, and a sequential draw is drawn later: the cheapest draw suffices here.
        is_drawn = slot is not None and not _is_drawn_in_turn(row, slot)
        sampling += [slot.sampling if slot is not None and is_drawn else _CHEAPEST] * row.num_draws
        end = row.position + row.num_tokens
        positions += range(end - row.num_draws + 1, end + 1)
    return sampling, positions


def sampled_token_indices(plan: StepPlan) -> list[int]:
    """Indices within the step of the tokens with the hidden states that the sampled rows are drawn from."""
    indices: list[int] = []
    offset = 0
    for row in plan.rows:
        offset += row.num_tokens
        indices += range(offset - row.num_draws, offset)
    return indices
