"""Draws tokens inside vLLM exactly as the last stage of the own runtime does, from the ids that vLLM shows.

vLLM samples with a generator that counts draws, so an answer started by another group would continue differently.
Here a token depends only on (seed, choice, position), the logits and the ids of prompt and output, by the same
functions: `SlotSampling.change` for bias, penalties and grammar, `sample` for temperature, truncation and keyed
noise. The drawn token is left as the only one that argmax can take.

vLLM removes a request that a step omits from its batch and adds it again with its next step. So the state computed
from its history is kept by the request's number, not by its place. vLLM reports finished requests the same way, so
only the latest states are kept; for a request that returns later, the state is recomputed from the ids that vLLM
shows. No ids are held of requests outside the batch. Uses torch, but nothing of vllm.
"""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from stageline_runtime.guided.guide import GuideMaker
from stageline_runtime.guided.json_grammars import JsonGrammars
from stageline_runtime.sampling.adjustments import Placing, stay
from stageline_runtime.sampling.device_sampler import sample_on_device
from stageline_runtime.stage.step.sampling_state import SlotSampling, slot_sampling
from stageline_vllm.request_draws import RequestDraws, read_draws

KEPT_FOR_EACH: Final = 2
"""Histories kept for each request that may run at once, the latest used first."""


class KeyedDraws:
    """The rows of vLLM's batch that are drawn here, by their place in it."""

    def __init__(self, model_dir: Path, vocab_size: int, most_at_once: int) -> None:
        """The first two are for grammars: where `tokenizer.json` is, and how many ids there are."""
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._most_kept = KEPT_FOR_EACH * most_at_once
        self._guides: dict[tuple[int, ...], GuideMaker] = {}
        self._rows: dict[int, _Row] = {}
        self._kept: OrderedDict[int, _Row] = OrderedDict()

    def add(
        self, place: int, extra_args: Mapping[str, Any] | None, prompt: list[int] | None, output: list[int]
    ) -> None:
        """A request was added to `place`, possibly again; vLLM keeps appending to the list `output`."""
        draws = read_draws(extra_args)
        if draws is None:
            self.remove(place)
            return
        assert prompt is not None, "vLLM shows no prompt ids of a request whose tokens depend on them"
        self.remove(place)
        row = self._kept.pop(draws.number, None) or self._row_of(draws)
        row.awaits_grammar = draws.awaits_grammar
        row.show(prompt, output)
        self._rows[place] = self._kept[draws.number] = row
        if len(self._kept) > self._most_kept:
            _, oldest = self._kept.popitem(last=False)
            if oldest not in self._rows.values():
                oldest.give_up()

    def remove(self, place: int) -> None:
        row = self._rows.pop(place, None)
        if row is not None:
            row.show([], [])

    def move(self, source: int, target: int, *, swap: bool) -> None:
        """Move the request at `source` to `target`; with `swap`, exchange the two."""
        moved, displaced = self._rows.pop(source, None), self._rows.pop(target, None)
        if moved is not None:
            self._rows[target] = moved
        if swap and displaced is not None:
            self._rows[source] = displaced

    @torch.inference_mode()
    def apply(self, logits: Tensor) -> Tensor:
        """Leave one token to each of these rows of float32 `logits` `[num_requests, vocab_size]`, in place."""
        places = sorted(self._rows)
        if not places:
            return logits
        assert places[-1] < len(logits), f"row {places[-1]} of a batch of {len(logits)}"
        rows = [self._rows[place] for place in places]
        bring = _placing(logits)
        for place, row in zip(places, rows, strict=True):
            row.change(logits[place], bring)
        index = bring(torch.tensor(places))
        tokens = _drawn(logits[index], rows, bring)
        logits[index] = float("-inf")
        logits[index, tokens] = 0.0
        return logits

    def _row_of(self, draws: RequestDraws) -> "_Row":
        sampling = draws.sampling
        if sampling.json_schema is None:
            return _Row(draws, slot_sampling(0, sampling, None))
        maker = self._guide_maker(draws.eos_token_ids)
        return _Row(draws, slot_sampling(0, sampling, maker.start(sampling.json_schema)), maker.grammars)

    def _guide_maker(self, eos_token_ids: tuple[int, ...]) -> GuideMaker:
        maker = self._guides.get(eos_token_ids)
        if maker is None:
            maker = GuideMaker(JsonGrammars(self._model_dir, self._vocab_size, eos_token_ids))
            self._guides[eos_token_ids] = maker
        return maker


class _Row:
    """One request: its parameters, the output followed so far, and vLLM's view of its ids."""

    def __init__(self, draws: RequestDraws, slot: SlotSampling, grammars: JsonGrammars | None = None) -> None:
        """`grammars` is the source of the slot's grammar."""
        self.slot = slot
        self._grammars = grammars
        self._eos_token_ids = draws.eos_token_ids
        self.awaits_grammar = False
        """Whether its tokens only say if the grammar is compiled (`RequestDraws`)."""
        self._prompt: list[int] = []
        self._output: list[int] = []
        self._followed: int | None = None
        """Output tokens added to the history; None before the prompt was added."""

    def show(self, prompt: list[int], output: list[int]) -> None:
        self._prompt, self._output = prompt, output

    @property
    def position(self) -> int:
        """Position of the token to draw; independent of which group generated the tokens before it."""
        return len(self._prompt) + len(self._output)

    def change(self, logits: Tensor, place: Placing) -> None:
        """Bias, penalise and mask `logits` `[vocab_size]`. Where the grammar is lost, a token that none admits is left.

        The engine follows the same grammar, and so fails the request.
        """
        if self.awaits_grammar:
            _leave(self._end if self._has_grammar else self._no_end, logits)
            return
        if self.slot.needs_history:
            self._follow()
        self.slot.change(logits, self.position, place)
        if self.slot.failure is not None:
            foreign = None if self._grammars is None else self._grammars.foreign_token
            _leave(self._end if foreign is None else foreign, logits)

    def give_up(self) -> None:
        """Compile no grammar for it that isn't being compiled yet."""
        if self.slot.guide is not None:
            self.slot.guide.compiled.cancel()

    @property
    def _has_grammar(self) -> bool:
        return self.slot.guide is None or self.slot.guide.compiled.done()

    @property
    def _end(self) -> int:
        return self._eos_token_ids[0] if self._eos_token_ids else 0

    @property
    def _no_end(self) -> int:
        return next(token for token in count() if token not in self._eos_token_ids)

    def _follow(self) -> None:
        if self._followed is None:
            self.slot.take_inputs(0, tuple(self._prompt))
            self._followed = 0
        new = self._output[self._followed :]
        assert len(self._output) >= self._followed, "vLLM took back tokens that it had generated"
        assert all(token >= 0 for token in new), "vLLM shows no ids of tokens that it has generated"
        for token in new:
            self.slot.take_output(token)
        self._followed = len(self._output)


def _leave(token: int, logits: Tensor) -> None:
    """Mask all logits except this token's."""
    logits.fill_(float("-inf"))
    logits[token] = 0.0


def _drawn(logits: Tensor, rows: list[_Row], bring: Placing) -> Tensor:
    sampling, positions = [row.slot.sampling for row in rows], [row.position for row in rows]
    return sample_on_device(logits, sampling, positions, bring)


def _placing(logits: Tensor) -> Placing:
    device = logits.device
    return stay if device.type == "cpu" else lambda tensor: tensor.to(device)
