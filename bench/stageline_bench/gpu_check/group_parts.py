"""Checks of whole groups: stages in their own processes, plans from the real engine core."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from stageline_api.runtime_config import SpeculativeConfig
from stageline_bench.gpu_check.one_stage import MOST_DIFFERENT_SHARE, agreement
from stageline_bench.gpu_check.random_model import LARGE, LARGE_VOCABULARY, SMALL, write_random_model, write_words
from stageline_bench.gpu_check.sections import CheckFailedError, Figures
from stageline_bench.gpu_check.shared_card import STAGE_COMMAND as SHARED_CARD
from stageline_bench.runtime.draft_model import LATE_SHARE, write_pair
from stageline_bench.runtime.group.bench_group import STAGE_COMMAND, GroupShape, bench_group
from stageline_bench.runtime.group.workload import Workload
from stageline_bench.runtime.record.figures import RoundReport
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.stage.telemetry.state_clock import BusyKind

SAME_TOKENS = Workload(name="same tokens", requests=8, input_tokens=40, output_tokens=32)
LONE = Workload(name="one request", requests=1, input_tokens=32, output_tokens=128)
THROUGHPUT = Workload(name="throughput", requests=64, input_tokens=32, output_tokens=128)
SAMPLED = replace(THROUGHPUT, name="sampled", temperature=0.7, top_p=0.95)
ROUNDS = 3
PR_35162_RATIO = 1.66
"""vLLM's pull request 35162: captured over eager at P = 2."""


class GroupParts:
    """Groups on the first device, or on one device for each stage."""

    def __init__(
        self, directory: Path, *, device: str = "cuda", stage_command: tuple[str, ...] = STAGE_COMMAND
    ) -> None:
        """`device` and `stage_command` replace a missing device."""
        self._directory = directory
        self._device = device
        self._stage_command = stage_command
        self._numbers = itertools.count(1)

    def staged(self) -> Figures:
        """Two stages on one device, over pinned memory and sockets: one stage's tokens, eager and captured."""
        return self._same_tokens(("0", "0"))

    def nccl(self) -> Figures:
        """Two and three stages over NCCL, on a shared card if there are too few devices: the tokens of one stage."""
        count = torch.cuda.device_count()
        figures: Figures = {}
        for stages in (2, 3):
            devices = tuple(str(stage % count) for stage in range(stages))
            parts = self if stages <= count else self._on_shared_cards()
            same = parts._same_tokens(devices)
            figures |= {f"P = {stages}, {name}": said for name, said in same.items()}
        return figures

    def _on_shared_cards(self) -> "GroupParts":
        return GroupParts(self._directory / "shared", device=self._device, stage_command=SHARED_CARD)

    def drafts(self) -> Figures:
        """A draft model on the last stage, alone and after another on the same device: the tokens without it."""
        model_dir, draft = self._pair("small")
        figures: Figures = {}
        for stages in (1, 2):
            plain = self._shape(("0",) * stages, "auto", "float32")
            expected = self._round(plain, model_dir).outputs
            # Regardless of their cost: with such a small model they cost more than they gain.
            report = self._round(self._drafting(plain, draft, "--free-drafts"), model_dir)
            equal = [agreement(one, other) for one, other in zip(expected, report.outputs, strict=True)]
            total = sum(map(len, expected))
            if sum(equal) < (1 - MOST_DIFFERENT_SHARE) * total:
                raise CheckFailedError(f"P = {stages}: tokens as without, before the first other one: {equal}")
            seconds = report.stages[-1].busy.get(BusyKind.DRAFT.value, 0.0)
            if not seconds:
                raise CheckFailedError(f"P = {stages}: the last stage says that it never drafted")
            figures[f"P = {stages}"] = f"{sum(equal)} of {total} tokens as without, drafting took {seconds:.2g} s"
        return figures

    def draft_gain(self) -> Figures:
        """One request with a draft model that mostly agrees, and without: rounds alternate."""
        model_dir, draft = self._pair("large")
        figures: Figures = {}
        for stages in (1, 2):
            plain = self._shape(("0",) * stages, "auto", "bfloat16")
            shapes = {"plain": plain, "drafts": self._drafting(plain, draft)}
            rates = {name: self._rates(shape, model_dir, LONE) for name, shape in shapes.items()}
            without, drafting = median(rates["plain"]), median(rates["drafts"])
            figures[f"P = {stages}"] = (
                f"{without:.0f} tok/s, with drafts {drafting:.0f} tok/s, {drafting / without:.2f} x"
            )
        return figures

    def throughput(self) -> Figures:
        """Captured over eager, at P = 1 and P = 2 on one device; the median of interleaved rounds' ratios."""
        model_dir = self._model("large")
        figures: Figures = {}
        for stages in (1, 2):
            shapes = {graphs: self._shape(("0",) * stages, graphs, "bfloat16") for graphs in ("off", "full")}
            rates = {graphs: self._rates(shape, model_dir) for graphs, shape in shapes.items()}
            eager, captured = median(rates["off"]), median(rates["full"])
            figures[f"P = {stages}"] = (
                f"eager {eager:.0f} tok/s, captured {captured:.0f} tok/s, {captured / eager:.2f} x "
                f"(rounds {_spread(rates['off'])} and {_spread(rates['full'])})"
            )
        return figures | {"vLLM's PR 35162 at P = 2": f"{PR_35162_RATIO} x (two B200, another model)"}

    def sampled_throughput(self) -> Figures:
        """Sampled over greedy at 64 rows of a large vocabulary, captured, P = 1; rounds alternate on one group."""
        model_dir = self._model("large-vocabulary")
        with bench_group(self._shape(("0",), "full", "bfloat16"), model_dir, self._folder()) as group:
            group.run(THROUGHPUT)
            group.run(SAMPLED)
            reports = [
                [group.run(workload.with_seed(seed)).tokens_per_second for workload in (THROUGHPUT, SAMPLED)]
                for seed in range(ROUNDS)
            ]
        greedy, sampled = (median(rates) for rates in zip(*reports, strict=True))
        return {"64 rows": f"greedy {greedy:.0f} tok/s, sampled {sampled:.0f} tok/s, {sampled / greedy:.2f} x"}

    def _rates(self, shape: GroupShape, model_dir: Path, workload: Workload = THROUGHPUT) -> list[float]:
        with bench_group(shape, model_dir, self._folder()) as group:
            group.run(workload)
            return [group.run(workload.with_seed(seed)).tokens_per_second for seed in range(ROUNDS)]

    def _same_tokens(self, devices: tuple[str, ...]) -> Figures:
        """All groups at once: only their tokens matter here."""
        model_dir = self._model("small")
        modes = ("off", "piecewise", "full")
        shapes = [self._shape(devices[:1], "off", "float32")]
        shapes += [self._shape(devices, graphs, "float32") for graphs in modes]
        with ThreadPoolExecutor(len(shapes)) as pool:
            rounds = pool.map(lambda shape: self._round(replace(shape, is_pinned=False), model_dir), shapes)
            expected, *others = [report.outputs for report in rounds]
        for graphs, outputs in zip(modes, others, strict=True):
            equal = sum(one == other for one, other in zip(expected, outputs, strict=True))
            if equal < len(expected):
                raise CheckFailedError(f"graphs {graphs}: only {equal} of {len(expected)} answers equal one stage's")
        return {"answers equal to one stage's": f"{len(expected)} of {len(expected)}, graphs off, piecewise and full"}

    def _round(self, shape: GroupShape, model_dir: Path) -> RoundReport:
        with bench_group(shape, model_dir, self._folder()) as group:
            return group.run(SAME_TOKENS)

    def _shape(self, devices: tuple[str, ...], graphs: str, dtype: str) -> GroupShape:
        return GroupShape(
            name=f"P = {len(devices)}, graphs {graphs}",
            stage_cores=tuple(range(len(devices))),
            dtype=dtype,
            max_model_len=256,
            graphs=graphs,
            device=self._device,
            visible_devices=devices,
            stage_command=self._stage_command,
        )

    @staticmethod
    def _drafting(shape: GroupShape, draft: Path, *options: str) -> GroupShape:
        speculative = SpeculativeConfig(draft_source=f"file://{draft}")
        return replace(shape, name=f"{shape.name}, drafts", speculative=speculative, engine_options=options)

    def _model(self, name: str) -> Path:
        directory = self._directory / name
        if not (directory / "model.safetensors").exists():
            sizes, device = {
                "small": (SMALL, "cpu"),
                "large": (LARGE, "cuda"),
                "large-vocabulary": (LARGE_VOCABULARY, "cuda"),
            }[name]
            write_random_model(directory, sizes, torch.device(device))
        return directory

    def _pair(self, name: str) -> tuple[Path, Path]:
        """A model dominated by its first layers, and these layers as its draft model."""
        model_dir, pair = self._model(name), self._directory / f"{name}-pair"
        if pair.exists():
            return pair / "target", pair / "draft"
        write_words(model_dir, read_model_config(model_dir).vocab_size)
        return write_pair(model_dir, pair, LATE_SHARE)

    def _folder(self) -> Path:
        return self._directory / f"group-{next(self._numbers)}"


def _spread(rates: list[float]) -> str:
    return f"{min(rates):.0f} to {max(rates):.0f}"
