"""Checks in one process: kernels, layers, captured graphs, memory, NCCL's start."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stageline_bench.gpu_check.attention_cases import TOLERANCE, cases, run
from stageline_bench.gpu_check.attention_speed import figures as attention_figures
from stageline_bench.gpu_check.expert_cases import TOLERANCE as EXPERT_TOLERANCE
from stageline_bench.gpu_check.expert_cases import captured_figures
from stageline_bench.gpu_check.expert_cases import cases as expert_cases
from stageline_bench.gpu_check.one_stage import MOST_DIFFERENT_SHARE, Answers, agreement, draw_prompts, whole_model
from stageline_bench.gpu_check.random_model import SMALL, SMALL_MIXTURE, write_random_model
from stageline_bench.gpu_check.row_cases import TOLERANCE as ROW_TOLERANCE
from stageline_bench.gpu_check.row_cases import results as row_results
from stageline_bench.gpu_check.sampling_cases import cases as sampling_cases
from stageline_bench.gpu_check.sampling_cases import run as run_draws
from stageline_bench.gpu_check.sampling_cases import timings, wrong_rows
from stageline_bench.gpu_check.sections import CheckFailedError, Figures, SkipSectionError
from stageline_runtime.accelerator.cuda import CudaAccelerator
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.models.decoder import build_stage_model
from stageline_runtime.models.families import device_builder
from stageline_runtime.models.layers.attention import Attention, AttentionHeads
from stageline_runtime.models.protocol import CaptureSizes
from stageline_runtime.plan_bus.messages import GraphMode
from stageline_runtime.plan_bus.step_plan import decode_sizes
from stageline_runtime.stage.failures import device_memory_failure
from stageline_runtime.stage.memory_use import blocks_to_measure, measure

NUM_PROMPTS = 6
NUM_TOKENS = 24
NCCL_PROCESS_SECONDS = 70.0
"""Time limit of the NCCL process."""


class DeviceParts:
    """One device and a small model in `directory`."""

    def __init__(
        self,
        directory: Path,
        accelerator: Accelerator | None = None,
        attention: Callable[[AttentionHeads], Attention] | None = None,
    ) -> None:
        """`accelerator` None uses the first CUDA device, `attention` None the Triton kernels."""
        self._directory = directory
        self._accelerator = accelerator
        self._attention = attention

    @property
    def accelerator(self) -> Accelerator:
        """The device, opened on first use."""
        if self._accelerator is None:
            self._accelerator = CudaAccelerator()
        return self._accelerator

    def facts(self) -> Figures:
        """The device and the software."""
        import triton

        free = self.accelerator.available_bytes()
        return {
            "device": self.accelerator.identity().rpartition(" ")[0],
            "processors": str(self.accelerator.num_processors),
            "free": f"{free >> 30} GiB",
            "torch": torch.__version__,
            "CUDA": str(torch.version.cuda),
            "triton": triton.__version__,
        }

    def attention(self) -> Figures:
        """Every case of the kernels on the device."""
        results = [run(case, self.accelerator.device) for case in cases()]
        wrong = [
            result
            for result in results
            if not (result["error"] <= TOLERANCE[result["case"]["dtype"]] and result["same_cache"])
        ]
        return _beside_plain_torch(wrong, [(result["case"]["dtype"], result["error"]) for result in results])

    def rows(self) -> Figures:
        """Every case of the kernels on rows."""
        results = row_results(self.accelerator.device)
        wrong = [result for result in results if not result["error"] <= ROW_TOLERANCE[result["dtype"]]]
        return _beside_plain_torch(wrong, [(result["dtype"], result["error"]) for result in results])

    def sampling(self) -> Figures:
        """Every case of the sampling kernels."""
        results = [run_draws(case, self.accelerator.device) for case in sampling_cases(thorough=True)]
        drawn = sum(len(result["drawn"]) for result in results)
        wrong = [row for result in results for row in wrong_rows(result)]
        if wrong:
            raise CheckFailedError(f"{len(wrong)} of {drawn} tokens differ from the CPU's, first {wrong[0]}")
        return {"tokens equal to the CPU's": f"{drawn} of {drawn}"}

    def sampling_speed(self) -> Figures:
        """Time of a step's sampling."""
        return timings(self.accelerator)

    def layers(self) -> Figures:
        """The device's stage compared with the CPU's, eagerly, token by token."""
        model_dir = self._small_model()
        config = read_model_config(model_dir)
        shape = whole_model(config, NUM_PROMPTS, torch.float32)
        prompts = draw_prompts(NUM_PROMPTS, config.vocab_size)
        on_cpu = build_stage_model(model_dir, config, shape, _quiet)
        expected = Answers(on_cpu, GraphMode.OFF, None).greedy(prompts, NUM_TOKENS)
        on_device = device_builder(self.accelerator, self._attention)(model_dir, config, shape, _quiet)
        actual = Answers(on_device, GraphMode.OFF, self.accelerator).greedy(prompts, NUM_TOKENS)
        first = [agreement(one, other) for one, other in zip(expected, actual, strict=True)]
        if min(first) < NUM_TOKENS and sum(first) < (1 - MOST_DIFFERENT_SHARE) * NUM_TOKENS * NUM_PROMPTS:
            raise CheckFailedError(f"tokens equal to the CPU's before the first other one, by prompt: {first}")
        return {"tokens equal to the CPU's": f"{sum(first)} of {NUM_TOKENS * NUM_PROMPTS}"}

    def experts(self) -> Figures:
        """Grouped products over experts compared with one expert after the other on the CPU."""
        errors: list[tuple[str, float]] = []
        for case in expert_cases():
            error = case.largest_error(self.accelerator.device)
            if not error <= EXPERT_TOLERANCE[case.dtype]:
                raise CheckFailedError(f"{case}: an error of {error:.1e}")
            errors.append((str(case.dtype).removeprefix("torch."), error))
        return _largest_errors(errors)

    def captured_experts(self) -> Figures:
        """A large mixture's experts in a graph: the eager results with other picks than at capture."""
        if not self.accelerator.queues_experts(torch.bfloat16):
            raise SkipSectionError("needs a device of sm_90 or sm_100, whose grouped products are one kernel")
        return captured_figures(self.accelerator) | self.captured_mixture()

    def captured_mixture(self) -> Figures:
        """A mixture's layers, captured: tokens compared with the eager ones. Chunks have other padding, which may round
        differently in bfloat16; a wrong replay agrees nowhere.
        """
        model_dir = self._directory / "small mixture"
        write_random_model(model_dir, SMALL_MIXTURE, torch.device("cpu"))
        config = read_model_config(model_dir)
        shape = whole_model(config, NUM_PROMPTS, torch.bfloat16)
        prompts = draw_prompts(NUM_PROMPTS, config.vocab_size)
        build = device_builder(self.accelerator, self._attention)
        expected = Answers(build(model_dir, config, shape, _quiet), GraphMode.OFF, self.accelerator)
        eager = expected.greedy(prompts, NUM_TOKENS)
        model = build(model_dir, config, shape, _quiet)
        sizes = CaptureSizes(decode=decode_sizes(NUM_PROMPTS), step=(shape.max_step_tokens,))
        model.capture_graphs(GraphMode.FULL, sizes, lambda _message: None)  # type: ignore[attr-defined]
        replayed = Answers(model, GraphMode.FULL, self.accelerator).greedy(prompts, NUM_TOKENS)
        equal = sum(agreement(one, other) for one, other in zip(eager, replayed, strict=True))
        if equal * 2 < NUM_TOKENS * NUM_PROMPTS:
            raise CheckFailedError(f"{equal} of {NUM_TOKENS * NUM_PROMPTS} tokens equal to the eager mixture's")
        return {"mixture's tokens equal to the eager ones": f"{equal} of {NUM_TOKENS * NUM_PROMPTS}"}

    def attention_speed(self) -> Figures:
        """Attention time of a layer."""
        return attention_figures(self.accelerator)

    def graphs(self) -> Figures:
        """Captured and eager runs of one stage give the same tokens; size and cost of a capture."""
        model_dir = self._small_model()
        config = read_model_config(model_dir)
        shape = whole_model(config, NUM_PROMPTS, torch.float32)
        prompts = draw_prompts(NUM_PROMPTS, config.vocab_size)
        build = device_builder(self.accelerator, self._attention)
        eager = Answers(build(model_dir, config, shape, _quiet), GraphMode.OFF, self.accelerator)
        expected = eager.greedy(prompts, NUM_TOKENS)
        figures: Figures = {}
        for mode in (GraphMode.PIECEWISE, GraphMode.FULL):
            model = build(model_dir, config, shape, _quiet)
            sizes = CaptureSizes(decode=decode_sizes(NUM_PROMPTS), step=(shape.max_step_tokens,))
            report = model.capture_graphs(mode, sizes, lambda _message: None)  # type: ignore[attr-defined]
            answers = Answers(model, mode, self.accelerator)
            for attempt in ("first", "second"):
                if (actual := answers.greedy(prompts, NUM_TOKENS)) != expected:
                    counts = Counter(agreement(one, other) for one, other in zip(expected, actual, strict=True))
                    raise CheckFailedError(f"{mode}, {attempt} run: equal tokens before the first other one {counts}")
            size = report.memory_bytes >> 20
            figures[f"{mode}"] = f"{report.graphs} graphs in {report.seconds:.1f} s, {size} MiB"
        return figures

    def shortage(self) -> Figures:
        """A full device reports how much memory was missing."""
        wanted = self.accelerator.available_bytes() * 2
        try:
            torch.empty(wanted, dtype=torch.uint8, device=self.accelerator.device)
        except torch.OutOfMemoryError as error:
            detail = device_memory_failure(error, "load").detail
            if "MiB of device memory are missing" not in detail:
                raise CheckFailedError(f"torch's words are not understood: {detail}") from error
            return {"said": detail.partition(";")[0]}
        raise CheckFailedError(f"{wanted} bytes were given by a device that has half of them")

    def measured(self) -> Figures:
        """The measurement at load, compared with a second run of the largest step.

        The remaining memory isn't filled with a cache; running groups show that the step fits beside it.
        """
        model_dir = self._small_model()
        config = read_model_config(model_dir)
        shape = whole_model(config, NUM_PROMPTS, torch.bfloat16)
        shape = replace(shape, num_blocks=blocks_to_measure(shape))
        model = device_builder(self.accelerator, self._attention)(model_dir, config, shape, _quiet)
        first, second = (measure(model, config, shape, GraphMode.OFF, self.accelerator) for _ in range(2))
        if second.step_bytes > first.step_bytes:
            raise CheckFailedError(f"the largest step took {second.step_bytes} bytes, and {first.step_bytes} before")
        return {
            "loading": f"{first.held_bytes >> 20} MiB",
            "largest step": f"{first.step_bytes / (1 << 20):.1f} MiB",
        }

    def nccl(self) -> Figures:
        """NCCL starts, for a communicator of one rank, and reports its errors to a link."""
        program = [sys.executable, "-m", "stageline_bench.gpu_check.nccl_start"]
        try:
            done = subprocess.run(program, capture_output=True, text=True, timeout=NCCL_PROCESS_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            words = (error.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
            raise CheckFailedError(f"NCCL took more than {NCCL_PROCESS_SECONDS:g} s: {words}") from error
        if done.returncode:
            raise CheckFailedError(f"status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
        figures: Figures = json.loads(done.stdout)
        return figures

    def _small_model(self) -> Path:
        directory = self._directory / "small"
        if not (directory / "model.safetensors").exists():
            write_random_model(directory, SMALL, torch.device("cpu"))
        return directory


def _beside_plain_torch(wrong: list[dict[str, Any]], errors: list[tuple[str, float]]) -> Figures:
    """The number of cases, and the largest error in each dtype."""
    if wrong:
        raise CheckFailedError(f"{len(wrong)} of {len(errors)} cases differ from plain torch, first {wrong[0]}")
    return {"cases": str(len(errors))} | _largest_errors(errors)


def _largest_errors(errors: list[tuple[str, float]]) -> Figures:
    largest: dict[str, float] = {}
    for dtype, error in errors:
        largest[dtype] = max(largest.get(dtype, 0.0), error)
    return {f"largest error {name}": f"{at:.1e}" for name, at in largest.items()}


def _quiet(_loaded_bytes: int, _total_bytes: int) -> None:
    pass
