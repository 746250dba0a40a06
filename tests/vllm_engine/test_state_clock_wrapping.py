"""The plugin round stand-ins for vLLM's classes, in a process of its own: what passes through, what is written down.

The stand-ins have the names and parameters that `stageline_vllm.seams` holds against the real vLLM; a worker overrides
some methods of its base class, as vLLM's CPU worker does.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stageline_vllm.step_ring import step_ring_path
from stageline_vllm.worker_state import (
    DIRECTORY_VARIABLE,
    State,
    WorkerPhase,
    WorkerState,
    WorkerStateReader,
    worker_state_path,
)

WORKER = """
import json, sys, time, types
from types import SimpleNamespace

class Handle:
    def wait(self): time.sleep(0.01)
    def is_completed(self): return False

class Tensor:
    def numel(self): return 100
    def element_size(self): return 2

class GroupCoordinator:
    def irecv_tensor_dict(self, src=None):
        time.sleep(0.02)
        return {"hidden": Tensor()}, [Handle()], []
    def isend_tensor_dict(self, tensor_dict, dst=None):
        return [Handle()]

class AsyncIntermediateTensors:
    def wait_for_comm(self): time.sleep(0.03)

class Worker:
    def __init__(self, rank):
        self.rank = rank
        self.parallel_config = SimpleNamespace(tensor_parallel_size=TENSOR, pipeline_parallel_size=2)
        self.model_config = SimpleNamespace(get_layers_start_end_indices=lambda config: (4, 9))
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False))
        self.device = None
    def init_device(self): self.device = SimpleNamespace(type="cpu")
    def load_model(self): raise NotImplementedError
    def get_model(self): return SimpleNamespace(parameters=lambda: [Tensor(), Tensor()])
    def determine_available_memory(self): return 77
    def initialize_from_config(self, kv_cache_config): return None
    def compile_or_warm_up_model(self): return 0.5
    def execute_model(self, scheduler_output): raise NotImplementedError
    def sample_tokens(self, grammar_output): return ("sampled", grammar_output)

for name, fields in {
    "vllm": {}, "vllm.distributed": {}, "vllm.v1": {}, "vllm.v1.worker": {},
    "vllm.distributed.parallel_state": {"GroupCoordinator": GroupCoordinator},
    "vllm.v1.worker.gpu_worker": {"Worker": Worker, "AsyncIntermediateTensors": AsyncIntermediateTensors},
}.items():
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update(fields)

from stageline_vllm.plugin.state_clock import register
register()
register()

class CpuWorker(Worker):
    def load_model(self): return "loaded"
    def execute_model(self, scheduler_output):
        if scheduler_output.fails:
            raise RuntimeError("out of luck")
        group = GroupCoordinator()
        group.irecv_tensor_dict()
        AsyncIntermediateTensors().wait_for_comm()
        time.sleep(0.04)
        for handle in group.isend_tensor_dict({"hidden": Tensor()}):
            handle.wait()
        return "executed"

def step(*names, fails=False):
    cached = SimpleNamespace(req_ids=list(names), num_computed_tokens=[10] * len(names))
    return SimpleNamespace(
        finished_req_ids=set(), num_scheduled_tokens=dict.fromkeys(names, 1), total_num_scheduled_tokens=len(names),
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, fails=fails,
    )

assert GroupCoordinator().isend_tensor_dict({})[0].is_completed() is False, "outside of a worker it only passes through"
worker = CpuWorker(RANK)
results = [worker.init_device(), worker.load_model(), worker.determine_available_memory()]
spec = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
results.append(worker.initialize_from_config(
    SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=1000)], num_blocks=8, kv_cache_groups=[spec])))
results.append(worker.compile_or_warm_up_model())
for _ in range(3):
    results += [worker.execute_model(step("a", "b")), worker.sample_tokens(None)]
print(json.dumps([results, time.monotonic_ns()]), flush=True)
sys.stdin.read()
try:
    worker.execute_model(step("a", fails=FAILS))
except RuntimeError:
    worker.sample_tokens(None)
    print("vLLM went on", flush=True)
"""


@dataclass(frozen=True)
class Run:
    results: list[Any]
    """What the calls gave."""
    ended: int
    """When they were over."""
    state: WorkerState
    """As a supervisor reads it, after those."""
    after: WorkerState
    """After one more step, and the end of the process."""
    status: int
    output: str
    log: str


def run(directory: Path, *, rank: int = 0, tensor: int = 1, fails: bool = False) -> Run:
    """A worker's life; its last step `fails`."""
    program = WORKER.replace("RANK", str(rank)).replace("TENSOR", str(tensor)).replace("FAILS", str(fails))
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, DIRECTORY_VARIABLE: str(directory)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1])
    results, ended = json.loads(line)
    reader = WorkerStateReader(worker_state_path(directory, rank % tensor))
    state = reader.read()
    output, log = process.communicate("")
    after = reader.read()
    assert state is not None
    assert after is not None
    return Run(results, ended, state, after, process.returncode, output, log)


def test_what_vllms_calls_give_passes_through_and_their_time_is_accounted_for(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.status == 0, done.log
    assert done.results == [None, "loaded", 77, None, 0.5] + ["executed", ["sampled", None]] * 3
    life, clock, counters = done.state.life, done.state.clock, done.state.counters
    assert (life.stage, life.rank, life.phase) == (0, 0, WorkerPhase.READY)
    assert (life.first_layer, life.end_layer, life.memory_bytes, life.kv_capacity_tokens) == (4, 9, 1400, 128)
    assert (clock.steps_done, counters.hidden_bytes_sent) == (3, 3 * 200)
    spent = clock.spent_at(done.ended)
    assert sum(spent.values()) == done.ended - clock.started_nanoseconds, "states sum to wall time exactly"
    assert spent[State.RECV] >= 3 * 0.05e9, "the receive and the wait for its tensors"
    assert spent[State.DECODE] >= 3 * 0.04e9
    assert spent[State.SEND] >= 3 * 0.01e9
    assert step_ring_path(tmp_path, 0).exists()


def test_an_exception_is_written_down_and_ends_the_worker_before_its_next_call(tmp_path: Path) -> None:
    """vLLM would drop it and call `sample_tokens`, and then send the next step's hidden states as this one's."""
    done = run(tmp_path, fails=True)
    assert (done.status, done.output) == (1, ""), done.log
    assert (done.after.life.phase, done.after.life.message) == (WorkerPhase.READY, "RuntimeError: out of luck")
    assert (done.after.clock.steps_begun, done.after.clock.steps_done) == (4, 3)
    assert "in execute_model" in done.log, "where it was raised"
    assert done.log.rstrip().endswith("RuntimeError: out of luck")


@pytest.mark.parametrize(("rank", "tensor", "stage", "place"), [(1, 1, 1, 0), (1, 2, 0, 1), (5, 3, 1, 2)])
def test_workers_of_a_stage_write_into_files_of_their_own(
    rank: int, tensor: int, stage: int, place: int, tmp_path: Path
) -> None:
    state = run(tmp_path, rank=rank, tensor=tensor).state
    assert (state.life.stage, state.life.rank) == (stage, place)
