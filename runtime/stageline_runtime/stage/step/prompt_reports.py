"""Log probabilities of prompts, computed on the last stage for the tokens of a chunk that its plan names, no others.

Logits of a whole chunk would take 300 MB for 512 tokens of a vocabulary of 150,000. So the head runs over a few rows at
a time (`planning.memory.report_rows`), and only the results are kept. The rows that the head runs over follow from
plans alone, so the ranks of a stage gather the same logits: a stale row is computed as well, and the engine drops its
report. On a device nothing waits: results are copied to the host behind the plan's other work, and read once the plan
is done.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stageline_runtime.accelerator.protocol import ComputeDevice
from stageline_runtime.models.protocol import StageModel
from stageline_runtime.plan_bus.messages import PlanRow, PromptReport, StepPlan
from stageline_runtime.plan_bus.prompt_report import packed
from stageline_runtime.sampling.logprobs import LOWEST

Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""`[num_tokens]`: log probabilities float32, ranks int32. `[num_tokens, top_count]`: ids int32, values float32."""


def logprobs_of(logits: Tensor, targets: Tensor, top_count: int) -> Results:
    """The raw distribution's word on `targets` `[num_rows]`, from float32 logits `[num_rows, vocab_size]`."""
    values = torch.log_softmax(logits, dim=-1).clamp_(min=LOWEST)
    own = values.gather(1, targets[:, None])
    ranks = (values > own).sum(dim=-1, dtype=torch.int32) + 1
    best = values.topk(min(top_count, values.shape[1]), dim=-1)
    return own.squeeze(1), ranks, best.indices.to(torch.int32), best.values


@dataclass(frozen=True, slots=True)
class _RowReport:
    planned: PlanRow
    results: Results

    def written(self) -> PromptReport:
        logprobs, ranks, ids, values = (tensor.flatten().tolist() for tensor in self.results)
        planned = self.planned
        return PromptReport(
            planned.slot,
            planned.generation,
            planned.position + planned.report_start + 1,
            self.results[2].shape[1],
            packed("f", logprobs),
            packed("i", ranks),
            packed("i", ids),
            packed("f", values),
        )


class StepReports:
    """What one plan reports of prompts, on its way to the host."""

    def __init__(self, rows: Iterable[_RowReport], device: ComputeDevice) -> None:
        self._rows = tuple(_RowReport(row.planned, _on_host(row.results, device)) for row in rows)
        self._copied = device.record()

    def written(self) -> tuple[PromptReport, ...]:
        """The reports, after waiting for the copy."""
        self._copied.wait()
        return tuple(row.written() for row in self._rows)


class PromptReports:
    """Makes the reports of plans, in their order."""

    def __init__(self, model: StageModel, rows_at_once: int, device: ComputeDevice) -> None:
        """`rows_at_once`: over how many rows the head runs at once."""
        self._model = model
        self._rows_at_once = rows_at_once
        self._device = device
        self._by_plan: dict[int, StepReports] = {}

    def run(self, plan: StepPlan, hidden: Tensor, *, tells: bool) -> None:
        """Compute what `plan` asks for of the hidden states `[padded_tokens, hidden_size]` of its tokens.

        `tells` False: another rank of the stage makes the reports, and here only the head takes part.
        """
        reports = list[_RowReport]()
        for row, states in _reported(plan, hidden):
            pieces = self._pieces(row, states, tells=tells)
            if tells:
                own, ranks, ids, values = (torch.cat(parts) for parts in zip(*pieces, strict=True))
                reports.append(_RowReport(row, (own, ranks, ids, values)))
        if tells:
            self._by_plan[plan.seq] = StepReports(reports, self._device)

    def take(self, seq: int) -> tuple[PromptReport, ...]:
        """The reports of a plan that is done; once."""
        reports = self._by_plan.pop(seq, None)
        return () if reports is None else reports.written()

    def _pieces(self, row: PlanRow, states: Tensor, *, tells: bool) -> list[Results]:
        targets = self._device.place(torch.tensor(row.report_targets, dtype=torch.int64))
        pieces = list[Results]()
        for at in range(0, len(states), self._rows_at_once):
            logits = self._model.head(states[at : at + self._rows_at_once])
            if tells:
                pieces.append(logprobs_of(logits, targets[at : at + self._rows_at_once], row.report_top))
        return pieces


def _reported(plan: StepPlan, hidden: Tensor) -> Iterator[tuple[PlanRow, Tensor]]:
    """The rows that report, with the hidden states of the tokens that they report after."""
    offset = 0
    for row in plan.rows:
        if row.report_targets:
            first = offset + row.report_start
            yield row, hidden[first : first + len(row.report_targets)]
        offset += row.num_tokens


def _on_host(results: Results, device: ComputeDevice) -> Results:
    own, ranks, ids, values = map(device.to_host, results)
    return own, ranks, ids, values
