"""Capture on a device: whole layers for plans of single tokens, all but attention for other plans.

A graph is made for each of a few sizes before the stage says that it has loaded; a plan runs in the smallest that
holds it, with more padding, which never leaves the stage. A plan larger than all of them runs eagerly: that too
follows from the plan alone. Inputs, the plan's table and outputs lie in buffers made at load. Communication is never
recorded, and attention reads all that changes from the table, so a replay is right for whatever plan the table holds.
What goes into an attention and comes out of it lies in buffers that all layers and all sizes share: each is read before
the next layer writes it, so that they take one layer's room at the largest size and not every layer's at every size.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from stageline_runtime.accelerator.protocol import Accelerator, Graph, GraphRecorder
from stageline_runtime.models.layers.attention import Rotary
from stageline_runtime.models.layers.decoder_layer import DecoderLayers, Heads
from stageline_runtime.models.layers.step_batch import BatchBounds, StepBatch, StepTable, StepTensors
from stageline_runtime.models.protocol import CaptureProgress, CaptureReport, CaptureSizes
from stageline_runtime.plan_bus.messages import GraphMode

SMALLEST_STEP = 16
"""Smaller plans with chunks pad to this; sizes double from here."""


class _Captured(Protocol):
    num_graphs: int

    def run(self, step: StepTensors) -> torch.Tensor:
        """Replay for the plan in the table; the result is valid until the next replay."""


class DeviceGraphs:
    def __init__(
        self,
        accelerator: Accelerator,
        recorder: GraphRecorder,
        layers: DecoderLayers,
        table: StepTable,
        *,
        bounds: BatchBounds,
        hidden_size: int,
        max_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        self._bounds = bounds
        self._accelerator = accelerator
        self._recorder = recorder
        self._layers = layers
        self._table = table
        self._max_tokens = max_tokens
        self._input = torch.zeros(0, hidden_size, dtype=dtype, device=accelerator.device)
        self._around_attention: _AroundAttention | None = None
        self._captured: dict[GraphMode, dict[int, _Captured]] = {GraphMode.FULL: {}, GraphMode.PIECEWISE: {}}

    def run(self, hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        num_tokens = batch.padded_tokens
        captured = self._captured[batch.graph_mode] if batch.graph_mode is not GraphMode.OFF else {}
        size = min((size for size in captured if size >= num_tokens), default=None)
        if size is None:
            return self._layers(hidden, self._table.fill(batch))
        self._accelerator.copy(self._input[:num_tokens], hidden)
        return captured[size].run(self._table.fill(batch.padded_to(size)))[:num_tokens]

    def capture(self, graphs: GraphMode, sizes: CaptureSizes, progress: CaptureProgress) -> CaptureReport:
        """Record for these sizes, on padding alone; the largest first, so that smaller ones fit its memory."""
        started_seconds, started_bytes = time.monotonic(), self._accelerator.allocated_bytes()
        count = 0
        runs = [(mode, size) for mode, size in _runs(graphs, sizes) if size <= self._max_tokens]  # no plan is larger
        self._input = self._input.new_zeros(max(size for _, size in runs), self._input.shape[1])
        for mode, size in runs:
            progress(f"capturing {mode} layers for {size} tokens")
            self._table.fill(StepBatch.padding(size, mode, self._bounds))
            captured: _Captured = self._whole(size) if mode is GraphMode.FULL else self._pieces(size)
            self._captured[mode][size] = captured
            count += captured.num_graphs
        self._accelerator.synchronize()
        return CaptureReport(
            graphs=count,
            seconds=time.monotonic() - started_seconds,
            memory_bytes=max(0, self._accelerator.allocated_bytes() - started_bytes),
        )

    def _whole(self, size: int) -> "_Whole":
        step = self._view(size)
        graph, output = self._recorder.record(lambda: self._layers(self._input[:size], step))
        return _Whole(graph, output)

    def _pieces(self, size: int) -> "_Pieces":
        """The first piece ends before the first attention; each other begins behind one and ends before the next."""
        layers, step = self._layers, self._view(size)
        hidden: torch.Tensor = self._input[:size]
        around = self._room_around_attention(hidden, step).first_rows(size)

        def first() -> Rotary:
            rotary = layers.rotary(step)
            around.take_heads(layers.before(0, hidden, rotary))
            return rotary

        graph, rotary = self._recorder.record(first)
        graphs = [graph]
        for layer in range(len(layers)):
            graph, hidden = self._recorder.record(_behind(layers, layer, hidden, around, rotary))
            graphs.append(graph)
        return _Pieces(self._accelerator, layers, graphs, around, rotary, hidden)

    def _view(self, size: int) -> StepTensors:
        """The table of a plan of `size` single-token rows."""
        return self._table.view(size, size, size if self._bounds.tiling.spare_parts else 0)

    def _room_around_attention(self, hidden: torch.Tensor, step: StepTensors) -> "_AroundAttention":
        """Made at the first of the captures, which is the largest."""
        if self._around_attention is None:
            rotary = self._layers.rotary(step)
            heads = self._layers.before(0, hidden, rotary)
            attended = self._layers.attend(0, heads, rotary, step)
            self._around_attention = _AroundAttention(
                (torch.zeros_like(heads[0]), torch.zeros_like(heads[1])), torch.zeros_like(attended)
            )
        return self._around_attention


def _behind(
    layers: DecoderLayers, layer: int, hidden: torch.Tensor, around: "_AroundAttention", rotary: Rotary
) -> Callable[[], torch.Tensor]:
    """The piece behind attention of `layer`: hidden out of it, and the heads of the next layer if there is one."""

    def work() -> torch.Tensor:
        after = layers.after(layer, hidden, around.attended)
        if layer + 1 < len(layers):
            around.take_heads(layers.before(layer + 1, after, rotary))
        return after

    return work


class _Whole:
    """One graph for all layers."""

    num_graphs = 1

    def __init__(self, graph: Graph, output: torch.Tensor) -> None:
        self._graph = graph
        self._output = output

    def run(self, _step: StepTensors) -> torch.Tensor:
        self._graph.replay()
        return self._output


class _AroundAttention(NamedTuple):
    """What attention reads, and what it leaves for the piece behind it."""

    heads: Heads
    attended: torch.Tensor

    def first_rows(self, num_tokens: int) -> "_AroundAttention":
        query_key, value = self.heads
        return _AroundAttention((query_key[:num_tokens], value[:num_tokens]), self.attended[:num_tokens])

    def take_heads(self, heads: Heads) -> None:
        for kept, made in zip(self.heads, heads, strict=True):
            kept.copy_(made)


class _Pieces:
    """A graph before, between and behind the layers' attentions, which run eagerly for the plan's own tiles."""

    def __init__(
        self,
        accelerator: Accelerator,
        layers: DecoderLayers,
        graphs: Sequence[Graph],
        around: _AroundAttention,
        rotary: Rotary,
        output: torch.Tensor,
    ) -> None:
        self._rotary = rotary
        self._accelerator = accelerator
        self._layers = layers
        self._first, *self._others = graphs
        self._around = around
        self._output = output
        self.num_graphs = len(graphs)

    def run(self, step: StepTensors) -> torch.Tensor:
        heads, attended = self._around
        self._first.replay()
        for layer, graph in enumerate(self._others):
            self._accelerator.copy(attended, self._layers.attend(layer, heads, self._rotary, step))
            graph.replay()
        return self._output


def _runs(graphs: GraphMode, sizes: CaptureSizes) -> Iterator[tuple[GraphMode, int]]:
    steps = step_sizes(max(sizes.step))
    if graphs is GraphMode.FULL:
        yield from ((GraphMode.FULL, size) for size in sorted(sizes.decode, reverse=True))
        yield from ((GraphMode.PIECEWISE, size) for size in sorted(steps, reverse=True))
    else:
        yield from ((GraphMode.PIECEWISE, size) for size in sorted({*sizes.decode, *steps}, reverse=True))


def step_sizes(most: int, smallest: int = SMALLEST_STEP) -> tuple[int, ...]:
    """Sizes for plans with chunks: doubling up to `most`, which is one of them."""
    sizes, size = [], smallest
    while size < most:
        sizes.append(size)
        size *= 2
    return (*sizes, most)
