"""A real group for a benchmark: P stages, each a process on its core, and an engine host; no pods, no HTTP.

A stage of several ranks is a supervisor and its rank processes, as in its pod.
"""

import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stageline_api import env, ports
from stageline_api.errors import UserError
from stageline_api.runtime_config import RuntimeConfig, SpeculativeConfig
from stageline_bench.runtime.group.engine_host import RoundOrder
from stageline_bench.runtime.group.line_process import LineProcess
from stageline_bench.runtime.group.workload import Workload
from stageline_bench.runtime.record.figures import RoundReport, ran_together
from stageline_runtime.model_facts.model_config import read_model_config

PATIENCE_SECONDS = 5.0
TRIES = 5
"""Rounds that may be lost on a busy machine before the measurement fails."""
MAX_MODEL_LEN = 640
INCARNATION = 1
STAGE_COMMAND = ("-m", "stageline_cli.main", "stage")
PINNED_RANKS = ("-m", "stageline_bench.runtime.group.pinned_ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Processes and their cores. `engine_cores` empty: the engine floats over all cores."""

    name: str
    stage_cores: tuple[int, ...]
    """One core per stage, with one thread; for a stage of ranks any of its cores."""
    engine_cores: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    max_model_len: int = MAX_MODEL_LEN
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    graphs: str = "auto"
    device: str = "cpu"
    visible_devices: tuple[str, ...] = ()
    """Visible CUDA devices of each stage; empty: all of them."""
    prefix_cache: bool = False
    """Off, so that whole prompts are computed: prefix caching would skip part of the measured work."""
    speculative: SpeculativeConfig | None = None
    engine_options: tuple[str, ...] = ()
    """Options of the engine host."""
    stage_command: tuple[str, ...] = field(default=STAGE_COMMAND)
    """Interpreter arguments that start a stage."""
    tensor: int = 1
    expert: int = 1
    rank_cores: tuple[int, ...] = ()
    """A core for each rank of a stage with several ranks."""
    is_pinned: bool = True
    """False: stages and their ranks float over all cores, with their default number of threads."""

    def cores_of(self, stage: int) -> tuple[int, ...]:
        """Cores of a stage; empty means any."""
        if not self.is_pinned:
            return ()
        return self.rank_cores or (self.stage_cores[stage],)

    def command_of_stage(self) -> tuple[str, ...]:
        """Interpreter arguments that start a stage; pinned ranks get a core each."""
        if not self.rank_cores or not self.is_pinned:
            return self.stage_command
        return (*PINNED_RANKS, ",".join(map(str, self.rank_cores)))


class BenchGroup:
    """A started group; rounds go in, reports come out."""

    def __init__(
        self,
        shape: GroupShape,
        addresses: Sequence[str],
        engine: LineProcess,
        stages: list[LineProcess],
        model_dir: Path,
    ) -> None:
        self.shape = shape
        self.addresses = tuple(addresses)
        """Addresses of the stages, in stage order."""
        self.engine = engine
        self.stages = stages
        self._model_dir = model_dir

    def begin(self, workload: Workload, start_at_seconds: float = 0.0) -> None:
        """Start a round, optionally at a time of the monotonic clock."""
        prompts = tuple(map(tuple, workload.prompts(read_model_config(self._model_dir).vocab_size)))
        order = RoundOrder(
            prompts=prompts,
            output_tokens=workload.output_tokens,
            temperature=workload.temperature,
            top_p=workload.top_p,
            start_at_seconds=start_at_seconds,
        )
        self.engine.order(order.model_dump_json())

    def run_order(self, order: RoundOrder) -> RoundReport:
        """One round of given prompts."""
        self.engine.order(order.model_dump_json())
        return self.finish()

    def finish(self) -> RoundReport:
        """The report of the started round."""
        return RoundReport.model_validate_json(self.engine.answer(self.stages))

    def run(self, workload: Workload) -> RoundReport:
        """One round."""
        self.begin(workload)
        return self.finish()


def run_together(groups: Sequence[BenchGroup], workload: Workload, delay_seconds: float = 0.2) -> list[RoundReport]:
    """The same round on several groups at the same time; repeated if one was delayed until another had ended.

    Raises:
        UserError: a process ended, or no round had all groups running at once.
    """
    for _ in range(TRIES):
        start = time.perf_counter() + delay_seconds
        for group in groups:
            group.begin(workload, start)
        reports = [group.finish() for group in groups]
        if ran_together(reports):
            return reports
    raise UserError(f"in {TRIES} rounds the engines never ran at the same time: this machine is too busy to measure")


@contextmanager
def bench_group(shape: GroupShape, model_dir: Path, directory: Path) -> Iterator[BenchGroup]:
    """Start a group on `model_dir`, wait until it is warm; every process is ended on exit.

    Raises:
        UserError: a process ended; the message contains its last output.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as ends:
        group = _start(shape, model_dir, directory, ends)
        try:
            group.engine.answer(group.stages)
            yield group
        except UserError as error:
            raise UserError("\n".join([error.message, *_last_words(directory)]), error.exit_code) from error
        group.engine.close_input()
        for process in (group.engine, *group.stages):
            process.end(PATIENCE_SECONDS)


def _start(shape: GroupShape, model_dir: Path, directory: Path, ends: ExitStack) -> BenchGroup:
    """Start every process of a group; `ends` ends them."""
    block = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
    addresses = [f"{block}.{stage + 1}" for stage in range(len(shape.stage_cores))]
    config = directory / "config.json"
    config.write_text(_config(shape, model_dir, directory).model_dump_json(), encoding="utf-8")
    token = secrets.token_hex(16)

    def start(name: str, stage: int, command: Sequence[str], cores: Sequence[int]) -> LineProcess:
        process = LineProcess(
            f"{shape.name}: {name}",
            [sys.executable, *command],
            cores=cores,
            environment=_environment(config, addresses, stage, token, directory / f"{name}.termination")
            | ({"OMP_NUM_THREADS": "1"} if shape.is_pinned else {})
            | _visible(shape, stage),
            log=directory / f"{name}.log",
        )
        ends.callback(process.end)
        return process

    made_by = shape.command_of_stage()
    stages = [start(f"stage-{i}", i, made_by, shape.cores_of(i)) for i in range(len(shape.stage_cores))]
    host = ["-m", "stageline_bench.runtime.group.engine_host", *shape.engine_options, *addresses]
    engine = start("engine", 0, host, shape.engine_cores)
    return BenchGroup(shape, addresses, engine, stages, model_dir)


def _visible(shape: GroupShape, stage: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": shape.visible_devices[stage]} if shape.visible_devices else {}


def _last_words(directory: Path) -> list[str]:
    """The last output of the stages: an engine that lost a stage does not know why."""
    return [
        f"{path.stem}: {path.read_text(encoding='utf-8')}" for path in sorted(directory.glob("stage-*.termination"))
    ]


def _config(shape: GroupShape, model_dir: Path, directory: Path) -> RuntimeConfig:
    return RuntimeConfig(
        prefix_cache=shape.prefix_cache,
        speculative=shape.speculative,
        model_name="bench",
        namespace="default",
        served_name="bench",
        source=f"file://{model_dir}",
        cache_dir=str(directory / "cache"),
        stage_count=len(shape.stage_cores),
        dtype=shape.dtype,
        max_model_len=shape.max_model_len,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        graphs=shape.graphs,
        device=shape.device,
        tensor=shape.tensor,
        expert=shape.expert,
    )


def _environment(config: Path, addresses: list[str], stage: int, token: str, termination: Path) -> dict[str, str]:
    return {
        env.CONFIG: str(config),
        env.STAGE_INDEX: str(stage),
        env.STAGE_COUNT: str(len(addresses)),
        env.GROUP_INDEX: "0",
        env.INCARNATION: str(INCARNATION),
        env.POD_IP: addresses[stage],
        env.MASTER_ADDR: addresses[0],
        env.MASTER_PORT: str(ports.RENDEZVOUS),
        env.BUS_TOKEN: token,
        env.TERMINATION_PATH: str(termination),
    }
