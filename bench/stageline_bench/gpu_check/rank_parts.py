"""Checks of stages with several ranks: exchanges, tokens, a killed rank. Each rank has its own device, or shares one if
there are too few (`shared_card`).
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from stageline_api import env
from stageline_api.errors import UserError
from stageline_api.failures import FailureClass, TerminationMessage
from stageline_bench.gpu_check.group_parts import SAME_TOKENS
from stageline_bench.gpu_check.random_model import SMALL, SMALL_MIXTURE, RandomModel, write_random_model
from stageline_bench.gpu_check.sections import CheckFailedError, Figures
from stageline_bench.gpu_check.shared_card import STAGE_COMMAND as SHARED_CARD
from stageline_bench.gpu_check.shared_card import node_environment
from stageline_bench.runtime.group.bench_group import GroupShape, bench_group
from stageline_bench.runtime.group.workload import Workload
from stageline_runtime.ranks.rank_area import RankArea
from stageline_runtime.stage.ranks.supervisor import VISIBLE_DEVICES

RANKS = 2
LONGEST_SECONDS = 400.0
LONG = Workload(name="until a rank is gone", requests=4, input_tokens=16, output_tokens=200)


CUDA = GroupShape(
    name="one rank",
    stage_cores=(0,),
    dtype="float32",
    max_model_len=256,
    graphs="off",
    device="cuda",
    visible_devices=("0",),
    is_pinned=False,
)


class RankParts:
    """Two ranks on two devices, in a group or alone."""

    def __init__(self, directory: Path, shape: GroupShape = CUDA, num_devices: int | None = None) -> None:
        """`shape` of one rank; `num_devices` None counts CUDA's. If there are too few, ranks share them
        (`shared_card`).
        """
        self._directory = directory
        self._one_rank = shape
        there = torch.cuda.device_count() if num_devices is None else num_devices
        self._is_shared = there < RANKS

    def exchanges(self) -> Figures:
        """Every kind of exchange has the right result, and the time of a sum."""
        folder = self._directory / "rank-exchanges"
        folder.mkdir()
        area = RankArea.create(RANKS, 4096)
        processes = [self._start_rank(rank, area, folder) for rank in range(RANKS)]
        try:
            answers = [process.communicate(timeout=LONGEST_SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
            os.close(area)
        for rank, (process, (_, errors)) in enumerate(zip(processes, answers, strict=True)):
            if process.returncode:
                raise CheckFailedError(f"rank {rank}: {errors.decode(errors='replace').strip().splitlines()[-1:]}")
        return {f"sum of {shape}": f"{took} µs" for shape, took in json.loads(answers[0][0]).items()}

    def tokens(self) -> Figures:
        """Two ranks that share each layer give the answers of one rank, in float32."""
        return self._same_answers("ranked", SMALL, replace(self._two_devices(), tensor=RANKS))

    def expert_tokens(self) -> Figures:
        """The same for two ranks that divide a mixture's experts, each with its own cache."""
        return self._same_answers("mixture", SMALL_MIXTURE, replace(self._two_devices(), expert=RANKS))

    def _same_answers(self, name: str, model: RandomModel, two_ranks: GroupShape) -> Figures:
        model_dir = self._model(name, model)
        with bench_group(self._one_rank, model_dir, self._directory / f"{name}-one-rank") as group:
            expected = group.run(SAME_TOKENS).outputs
        with bench_group(two_ranks, model_dir, self._directory / f"{name}-two-ranks") as group:
            outputs = group.run(SAME_TOKENS).outputs
        equal = sum(a == b for a, b in zip(expected, outputs, strict=True))
        if equal < len(expected):
            raise CheckFailedError(f"only {equal} of {len(expected)} answers equal one rank's")
        return {"answers equal to one rank's": f"{equal} of {len(expected)}"}

    def lost_rank(self) -> Figures:
        """A rank killed during exchanges: its stage ends and reports the rank."""
        folder = self._directory / "lost-rank"
        try:
            two_ranks = replace(self._two_devices(), tensor=RANKS)
            with bench_group(two_ranks, self._model("ranked", SMALL), folder) as group:
                group.begin(LONG)
                os.kill(_last_rank(group.stages[0].process.pid), signal.SIGKILL)
                group.stages[0].process.wait(timeout=LONGEST_SECONDS)
                group.finish()
        except UserError:
            pass  # the engine lost its stage, as expected
        else:
            raise CheckFailedError("the round went on without the rank")
        words = TerminationMessage.model_validate_json((folder / "stage-0.termination").read_bytes())
        if (words.failure_class, words.rank) != (FailureClass.KILLED, RANKS - 1):
            raise CheckFailedError(f"the stage said {words.failure_class}, rank {words.rank}: {words.detail}")
        return {"named": f"stage 0, rank {words.rank}"}

    def _two_devices(self) -> GroupShape:
        two = replace(self._one_rank, name="two ranks", visible_devices=(",".join(self._devices()),))
        return replace(two, stage_command=SHARED_CARD) if self._is_shared else two

    def _devices(self) -> tuple[str, ...]:
        """Visible devices of each rank."""
        return tuple("0" if self._is_shared else str(rank) for rank in range(RANKS))

    def _start_rank(self, rank: int, area: int, folder: Path) -> "subprocess.Popen[bytes]":
        given = {env.STAGE_RANK: str(rank), env.RANK_AREA: str(area), env.RANK_STORE: str(folder / "meeting")}
        given |= {VISIBLE_DEVICES: self._devices()[rank]}
        if self._is_shared:
            given |= node_environment(f"rank-{rank}")
        return subprocess.Popen(
            [sys.executable, "-m", "stageline_bench.gpu_check.rank_exchanges"],
            env={**os.environ, **given},
            pass_fds=(area,),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )

    def _model(self, name: str, model: RandomModel) -> Path:
        directory = self._directory / name
        if not (directory / "model.safetensors").exists():
            write_random_model(directory, model, torch.device("cpu"))
        return directory


def _last_rank(stage: int) -> int:
    """The process of the last rank, below that of its stage."""
    below = [stage]
    for process in below:
        mark = f"{env.STAGE_RANK}={RANKS - 1}".encode()
        if mark in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            return process
        below += map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
    raise CheckFailedError(f"no rank {RANKS - 1} among {below}")
