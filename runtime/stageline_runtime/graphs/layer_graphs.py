"""Capture on CPU: torch.compile of one layer's parts, compiled once for each kind of layer and used by all of its kind.

The compiled code is kept on disk under the model cache, so that a later start only traces. Everything is compiled
before the stage says that it has loaded; a plan whose shape nevertheless needs more runs the same code uncompiled
rather than make the whole pipeline wait for a compiler.
"""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import torch

from stageline_api.runtime_config import COMPILED_SUBDIRECTORY
from stageline_runtime.models.cpu.kv_cache import AttentionBatch
from stageline_runtime.models.protocol import CaptureProgress, CaptureReport, CaptureSizes, GraphsUnavailableError
from stageline_runtime.models.rotary import RotaryTable
from stageline_runtime.plan_bus.messages import GraphMode

if TYPE_CHECKING:
    from stageline_runtime.models.cpu.decoder_layer import DecoderLayer

logger = logging.getLogger(__name__)

Rotary = tuple[torch.Tensor, torch.Tensor]


class LayerGraphs:
    """The compiled parts of a stage's layers. Call `warm_up` once, then `run` for each layer of a plan.

    Raises:
        GraphsUnavailableError: no C++ compiler.
    """

    def __init__(self, graphs: GraphMode, cache_dir: Path) -> None:
        compiler = os.environ.get("CXX") or "g++"
        if shutil.which(compiler) is None:
            raise GraphsUnavailableError(f"torch.compile needs a C++ compiler, and {compiler} is not on the path")
        self._graphs = graphs
        _keep_compiled_code(cache_dir)
        self._before = _compiled(lambda layer, hidden, rotary: layer.before_attention(hidden, rotary))
        self._after = _compiled(lambda layer, hidden, attended: layer.after_attention(hidden, attended))
        self._decode = _compiled(lambda layer, hidden, rotary, rows: layer.decode(hidden, rotary, rows))

    def run(self, layer: "DecoderLayer", hidden: torch.Tensor, rotary: Rotary, batch: AttentionBatch) -> torch.Tensor:
        """One layer of a plan, in the plan's mode: hidden `[padded_tokens, hidden_size]` to the same shape."""
        match batch.graph_mode:
            case GraphMode.FULL:
                result: torch.Tensor = self._decode(layer, hidden, rotary, batch.decode_rows)
            case GraphMode.PIECEWISE:
                query_key, value = self._before(layer, hidden, rotary)
                result = self._after(layer, hidden, layer.attention.rotated(query_key, value, batch))
            case GraphMode.OFF:
                result = layer(hidden, rotary, batch)
            case _:
                assert_never(batch.graph_mode)
        return result

    def warm_up(
        self,
        layers: Sequence["DecoderLayer"],
        hidden_size: int,
        rotary: RotaryTable,
        sizes: CaptureSizes,
        progress: CaptureProgress,
    ) -> CaptureReport:
        """Compile for these sizes, by running what they need on padding alone."""
        started_seconds, started_bytes = time.monotonic(), _resident_bytes()
        graphs_before = _num_compiled()
        for mode, num_tokens in self._runs(sizes):
            if mode is GraphMode.FULL and any(layer.attention.handle is None for layer in layers):
                raise GraphsUnavailableError("whole layers need the decode kernel, which this machine can't build")
            progress(f"compiling {mode} layers for {num_tokens} tokens")
            hidden = torch.zeros(num_tokens, hidden_size, dtype=rotary.dtype)
            batch = _padding(num_tokens, mode)
            self._compile(layers, hidden, rotary.at(batch.positions), batch)
        torch.compiler.set_stance("eager_on_recompile")
        return CaptureReport(
            graphs=_num_compiled() - graphs_before,
            seconds=time.monotonic() - started_seconds,
            memory_bytes=max(0, _resident_bytes() - started_bytes),
        )

    def _runs(self, sizes: CaptureSizes) -> Iterator[tuple[GraphMode, int]]:
        """Largest first: a graph made for many tokens serves fewer too, but for a single one."""
        if self._graphs is GraphMode.FULL:
            yield from ((GraphMode.FULL, size) for size in sorted(sizes.decode, reverse=True))
            yield from ((GraphMode.PIECEWISE, size) for size in sorted(sizes.step, reverse=True))
        else:
            both = {*sizes.decode, *sizes.step}
            yield from ((GraphMode.PIECEWISE, size) for size in sorted(both, reverse=True))

    def _compile(
        self, layers: Sequence["DecoderLayer"], hidden: torch.Tensor, rotary: Rotary, batch: AttentionBatch
    ) -> None:
        """`run`, with every input's number of tokens marked as one that changes: unmarked, it would be compiled in."""
        for tensor in (hidden, *rotary, batch.decode_rows):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        try:
            for layer in layers:
                if batch.graph_mode is GraphMode.FULL:
                    self._decode(layer, hidden, rotary, batch.decode_rows)
                    continue
                query_key, value = self._before(layer, hidden, rotary)
                attended = layer.attention.rotated(query_key, value, batch)
                torch._dynamo.maybe_mark_dynamic(attended, 0)
                self._after(layer, hidden, attended)
        except torch._dynamo.exc.TorchDynamoException as error:
            words = " ".join(line.strip() for line in str(error).splitlines()[:2])
            raise GraphsUnavailableError(f"torch.compile failed: {words}") from error


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def _keep_compiled_code(cache_dir: Path) -> None:
    """Name the cache before the compiler is first used: what the pod names, otherwise a part of the model cache.

    Without leave to write there a temporary folder is named: the compiler's own default asks for the user's name, and
    a pod's user has none.
    """
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir / COMPILED_SUBDIRECTORY)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        logger.warning("compiled layers can't be kept for later starts: %s can't be written", folder)
        folder = Path(tempfile.mkdtemp(prefix="stageline-compiled-"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    # Workers that compile in parallel cost more to start than the few graphs take, and outlive a killed stage.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _padding(num_tokens: int, mode: GraphMode) -> AttentionBatch:
    rows = torch.tensor([(token, -1, 0) for token in range(num_tokens)], dtype=torch.int64)
    return AttentionBatch(
        positions=torch.zeros(num_tokens, dtype=torch.int64),
        prefill=(),
        decode=(),
        decode_rows=rows,
        chunk_rows=torch.zeros(0, 4, dtype=torch.int64),
        graph_mode=mode,
        written=(),
    )


def _num_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
