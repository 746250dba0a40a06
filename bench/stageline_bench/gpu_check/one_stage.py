"""Greedy answers of one stage without engine or processes: two runs differ only by the stage."""

from collections.abc import Sequence

import torch

from stageline_api.runtime_config import LayerRange
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.models.protocol import StageModel, StageShape
from stageline_runtime.plan_bus.messages import GraphMode, PlanRow, SlotBlocks, StepPlan
from stageline_runtime.plan_bus.step_plan import blocks_of, padded_size, plan_graph_mode

MAX_STEP_TOKENS = 64
CHUNK_TOKENS = 24
SLOT_TOKENS = 160
MOST_DIFFERENT_SHARE = 0.02
"""CPU and GPU, or steps of other sizes, round differently; with random weights, two logits are sometimes closer."""


def whole_model(config: ModelConfig, num_slots: int, dtype: torch.dtype) -> StageShape:
    """All layers on one stage."""
    return StageShape(
        layers=LayerRange(first=0, last=config.num_layers - 1),
        is_first=True,
        is_last=True,
        dtype=dtype,
        num_cohorts=1,
        num_slots=num_slots,
        slot_tokens=SLOT_TOKENS,
        max_step_tokens=MAX_STEP_TOKENS,
    )


def draw_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Prompts of different lengths, from a fixed seed."""
    generator = torch.Generator().manual_seed(11)
    lengths = [3 + (17 * index) % 70 for index in range(count)]
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of equal tokens before the first difference."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


class Answers:
    """Continues prompts, one slot each, with chunks and single tokens in one plan if they coincide."""

    def __init__(self, model: StageModel, graphs: GraphMode, accelerator: Accelerator | None) -> None:
        self._model = model
        self._graphs = graphs
        self._place = torch.clone if accelerator is None else accelerator.place
        self._seq = 0

    @torch.inference_mode()
    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """`num_tokens` tokens after each prompt."""
        width = blocks_of(SLOT_TOKENS)
        self._model.change_tables(
            [SlotBlocks(slot, 0, tuple(range(slot * width, (slot + 1) * width)), True) for slot in range(len(prompts))]
        )
        texts = [list(prompt) for prompt in prompts]
        computed = [0] * len(prompts)
        while any(len(text) < len(prompt) + num_tokens for text, prompt in zip(texts, prompts, strict=True)):
            self._step(texts, computed, [len(prompt) + num_tokens for prompt in prompts])
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]

    def _step(self, texts: list[list[int]], computed: list[int], ends: list[int]) -> None:
        rows: list[PlanRow] = []
        room = MAX_STEP_TOKENS
        for slot, text in enumerate(texts):
            chunk = text[computed[slot] :][: min(CHUNK_TOKENS, room)]
            if len(text) >= ends[slot] or not chunk:
                continue
            is_whole = computed[slot] + len(chunk) == len(text)
            rows.append(PlanRow(slot, 1, computed[slot], len(chunk), tuple(chunk), need_sample=is_whole))
            room -= len(chunk)
        for row, token in zip([row for row in rows if row.need_sample], self._run(rows), strict=True):
            texts[row.slot].append(token)
        for row in rows:
            computed[row.slot] += row.num_tokens

    def _run(self, rows: list[PlanRow]) -> list[int]:
        ids = [token for row in rows for token in row.token_ids]
        padded = padded_size(len(ids))
        mode = plan_graph_mode(self._graphs, rows, dummy=False)
        plan = StepPlan(self._seq, 0, (), tuple(rows), padded, -1, feedback_posted=False, dummy=False, graph_mode=mode)
        self._seq += 1
        token_ids = self._place(torch.tensor(ids + [0] * (padded - len(ids))))
        hidden = self._model.layers(self._model.embed(token_ids), self._model.step_batch(plan))
        ends = torch.tensor([row.num_tokens for row in rows]).cumsum(0) - 1
        sampled = ends[torch.tensor([row.need_sample for row in rows])]
        if not len(sampled):
            return []
        logits = self._model.head(hidden[self._place(sampled)])
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        return tokens
