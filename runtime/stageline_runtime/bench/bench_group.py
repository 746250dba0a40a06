"""A real group for a benchmark: P stage processes, each on its core, and an engine host; no pods, no HTTP door."""

import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stageline_api import env, ports
from stageline_api.errors import UserError
from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.bench.engine_host import RoundOrder
from stageline_runtime.bench.figures import RoundReport
from stageline_runtime.bench.line_process import LineProcess
from stageline_runtime.bench.workload import Workload
from stageline_runtime.model_config import read_model_config

PATIENCE_SECONDS = 5.0
STAGE_COMMAND = ("-m", "stageline_cli.main", "stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """What to start and where. `engine_cores` empty: the engine floats over all cores."""

    name: str
    stage_cores: tuple[int, ...]
    """One core per stage; a stage computes with one thread."""
    engine_cores: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    max_model_len: int = 640
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    stage_command: tuple[str, ...] = field(default=STAGE_COMMAND)
    """Arguments of the interpreter that make a stage."""


class BenchGroup:
    """A started group; rounds go in, reports come out."""

    def __init__(self, shape: GroupShape, engine: LineProcess, stages: list[LineProcess], vocab_size: int) -> None:
        self.shape = shape
        self._engine = engine
        self._stages = stages
        self._vocab_size = vocab_size

    def begin(self, workload: Workload, start_at_seconds: float = 0.0) -> None:
        """Have a round start, at a moment of the monotonic clock if one is given."""
        prompts = tuple(map(tuple, workload.prompts(self._vocab_size)))
        order = RoundOrder(prompts=prompts, output_tokens=workload.output_tokens, start_at_seconds=start_at_seconds)
        self._engine.order(order.model_dump_json())

    def finish(self) -> RoundReport:
        """The report of the round that was begun."""
        return RoundReport.model_validate_json(self._engine.answer(self._stages))

    def run(self, workload: Workload) -> RoundReport:
        """One round."""
        self.begin(workload)
        return self.finish()


def run_together(groups: Sequence[BenchGroup], workload: Workload, delay_seconds: float = 0.2) -> list[RoundReport]:
    """The same round on several groups at the same moment."""
    start = time.perf_counter() + delay_seconds
    for group in groups:
        group.begin(workload, start)
    return [group.finish() for group in groups]


@contextmanager
def bench_group(shape: GroupShape, model_dir: Path, directory: Path) -> Iterator[BenchGroup]:
    """Start a group on `model_dir`, wait until it is warm; every process is ended on the way out.

    Raises:
        UserError: a process ended; the message holds its last words.
    """
    directory.mkdir(parents=True, exist_ok=True)
    count = len(shape.stage_cores)
    block = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
    addresses = [f"{block}.{stage + 1}" for stage in range(count)]
    config = directory / "config.json"
    config.write_text(_config(shape, model_dir, directory).model_dump_json(), encoding="utf-8")
    token = secrets.token_hex(16)
    with ExitStack() as ends:

        def start(name: str, stage: int, command: Sequence[str], cores: Sequence[int]) -> LineProcess:
            process = LineProcess(
                f"{shape.name}: {name}",
                [sys.executable, *command],
                cores=cores,
                environment=_environment(config, addresses, stage, token, directory / f"{name}.termination"),
                log=directory / f"{name}.log",
            )
            ends.callback(process.end)
            return process

        stages = [start(f"stage-{i}", i, shape.stage_command, [core]) for i, core in enumerate(shape.stage_cores)]
        host = ["-m", "stageline_runtime.bench.engine_host", *addresses]
        engine = start("engine", 0, host, shape.engine_cores)
        try:
            engine.answer(stages)
            yield BenchGroup(shape, engine, stages, read_model_config(model_dir).vocab_size)
        except UserError as error:
            raise UserError("\n".join([error.message, *_last_words(directory)]), error.exit_code) from error
        engine.close_input()
        for process in (engine, *stages):
            process.end(PATIENCE_SECONDS)


def _last_words(directory: Path) -> list[str]:
    """What the stages said before they ended: an engine that lost one only knows that it is gone."""
    return [
        f"{path.stem}: {path.read_text(encoding='utf-8')}" for path in sorted(directory.glob("stage-*.termination"))
    ]


def _config(shape: GroupShape, model_dir: Path, directory: Path) -> RuntimeConfig:
    return RuntimeConfig(
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
    )


def _environment(config: Path, addresses: list[str], stage: int, token: str, termination: Path) -> dict[str, str]:
    return {
        env.CONFIG: str(config),
        env.STAGE_INDEX: str(stage),
        env.STAGE_COUNT: str(len(addresses)),
        env.GROUP_INDEX: "0",
        env.INCARNATION: "1",
        env.POD_IP: addresses[stage],
        env.MASTER_ADDR: addresses[0],
        env.MASTER_PORT: str(ports.RENDEZVOUS),
        env.BUS_TOKEN: token,
        env.TERMINATION_PATH: str(termination),
        "OMP_NUM_THREADS": "1",
    }
