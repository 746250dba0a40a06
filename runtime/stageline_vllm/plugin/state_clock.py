"""The entry point `vllm.general_plugins`: a state clock around the few calls in which a vLLM worker spends its time.

vLLM loads it in each of its processes; only a process that makes a worker gets a clock. `Worker.execute_model` and
`Worker.sample_tokens` are a step; `irecv_tensor_dict`, the wait for its tensors, `isend_tensor_dict` and the waits
for earlier sends are its transfers. Time between steps is starved or idle; time between a step's two calls is host.
The clock publishes into files that the supervisor reads (`worker_state`, `step_ring`).

The plugin changes one behaviour: an exception that leaves one of these calls ends the worker (`last_words`),
because vLLM may drop it and continue. Arguments and results pass through unchanged, and without
`STAGELINE_WORKER_STATE` no call is wrapped.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from stageline_vllm.plugin.last_words import LastWords
from stageline_vllm.plugin.worker_watch import WorkerWatch
from stageline_vllm.step_ring import StepRingWriter, step_ring_path
from stageline_vllm.worker_clock import WorkerClock
from stageline_vllm.worker_state import DIRECTORY_VARIABLE, Operation, WorkerPhase, WorkerStateWriter, worker_state_path

_LIFE_CALLS: Final = {
    "load_model": (WorkerPhase.LOADING, Operation.LOAD),
    "determine_available_memory": (WorkerPhase.WARMING, Operation.WARM),
    "initialize_from_config": (WorkerPhase.WARMING, Operation.WARM),
    "compile_or_warm_up_model": (WorkerPhase.WARMING, Operation.WARM),
}
_watch: WorkerWatch | None = None
"""This process's worker: vLLM makes one in a process."""
_last_words: LastWords | None = None


def register() -> None:
    """Called by vLLM, in each of its processes and maybe more than once."""
    if not os.environ.get(DIRECTORY_VARIABLE):
        return
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.worker.gpu_worker import AsyncIntermediateTensors, Worker

    if hasattr(Worker, "_stageline_wrapped"):
        return
    Worker._stageline_wrapped = True
    _wrap(Worker, "__init__", _around_init)
    _wrap(GroupCoordinator, "irecv_tensor_dict", _around_receive)
    _wrap(GroupCoordinator, "isend_tensor_dict", _around_send)
    _wrap(AsyncIntermediateTensors, "wait_for_comm", _around_receive)


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _around_init(original: Callable[..., None], worker: Any, *args: Any, **kwargs: Any) -> None:
    """The first worker of its class: its own methods are wrapped, which may override those of `Worker`."""
    global _watch, _last_words
    original(worker, *args, **kwargs)
    tensor = worker.parallel_config.tensor_parallel_size
    stage, rank = divmod(worker.rank, tensor)
    directory = Path(os.environ[DIRECTORY_VARIABLE])
    ring = StepRingWriter(step_ring_path(directory, rank))
    writer = WorkerStateWriter(worker_state_path(directory, rank))
    clock = WorkerClock(writer, stage=stage, rank=rank, step_done=ring.append)
    _last_words = LastWords(clock)
    _watch = WorkerWatch(
        clock,
        is_last_stage=stage == worker.parallel_config.pipeline_parallel_size - 1,
        is_asynchronous=bool(worker.vllm_config.scheduler_config.async_scheduling),
    )
    own = type(worker)
    if "_stageline_methods" in own.__dict__:
        return
    own._stageline_methods = True
    _wrap(own, "init_device", _ending(_around_init_device))
    for name in _LIFE_CALLS:
        _wrap(own, name, _ending(functools.partial(_around_life, name)))
    _wrap(own, "execute_model", _ending(_around_execute))
    _wrap(own, "sample_tokens", _ending(_around_sample))


def _ending(around: Callable[..., Any]) -> Callable[..., Any]:
    """An exception ends the worker, also one of the clock itself."""

    def ending(*args: Any, **kwargs: Any) -> Any:
        assert _last_words is not None, "a worker's method was called before its __init__"
        with _last_words.of_call():
            return around(*args, **kwargs)

    return ending


def _around_init_device(original: Callable[..., Any], worker: Any) -> Any:
    watch = _the_watch()
    done = original(worker)
    if worker.device.type == "cuda":
        watch.use_device()
    return done


def _around_life(name: str, original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    watch, (phase, operation) = _the_watch(), _LIFE_CALLS[name]
    with watch.living(phase, operation):
        done = original(worker, *args, **kwargs)
    match name:
        case "load_model":
            first, end = worker.model_config.get_layers_start_end_indices(worker.parallel_config)
            parameters = worker.get_model().parameters()
            held = sum(one.numel() * one.element_size() for one in parameters)
            watch.clock.live(replace(watch.clock.life, first_layer=first, end_layer=end, memory_bytes=held))
        case "initialize_from_config":
            watch.note_cache(args[0] if args else kwargs["kv_cache_config"])
        case "compile_or_warm_up_model":
            watch.clock.enter_phase(WorkerPhase.READY)
    return done


def _around_execute(original: Callable[..., Any], worker: Any, scheduler_output: Any) -> Any:
    watch = _the_watch()
    watch.begin(scheduler_output)
    done = original(worker, scheduler_output)
    watch.executed()
    return done


def _around_sample(original: Callable[..., Any], worker: Any, grammar_output: Any) -> Any:
    watch = _the_watch()
    watch.sample()
    done = original(worker, grammar_output)
    watch.sampled()
    return done


def _around_receive(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
    if _watch is None:
        return original(owner, *args, **kwargs)
    with _watch.receiving():
        return original(owner, *args, **kwargs)


def _around_send(original: Callable[..., Any], group: Any, tensor_dict: Any, *args: Any, **kwargs: Any) -> Any:
    if _watch is None:
        return original(group, tensor_dict, *args, **kwargs)
    with _watch.sending():
        handles = original(group, tensor_dict, *args, **kwargs)
    return _watch.sent(tensor_dict, handles)


def _the_watch() -> WorkerWatch:
    assert _watch is not None, "a worker's method was called before its __init__"
    return _watch
