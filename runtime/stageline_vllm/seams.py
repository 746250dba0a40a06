"""Every name inside vLLM that this package uses, and its purpose. Check this module when a new vLLM is released.

`broken_seams` runs inside vLLM's environment (`python -m stageline_vllm.seams`). It imports each name and compares
all that it can without running code, so that it lists the names that a new wheel has changed.
"""

import importlib
import inspect
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from stageline_api.resource.pods.vllm_environment import OUTSIDE_VLLMS_LIST, OWNED_VARIABLES


@dataclass(frozen=True, slots=True)
class Seam:
    path: str
    """`module:attribute.attribute`, or a module."""
    purpose: str
    parameters: tuple[str, ...] = ()
    """Of a callable: names of its first parameters, `self` left out."""
    fields: tuple[str, ...] = ()
    """Of a class: attributes or annotated fields that it must have."""
    attributes_in_source: tuple[str, ...] = ()
    """Of a class: attributes that its own code sets on `self`."""
    phrases: tuple[str, ...] = ()
    """For a module: phrases that it writes into its log or its metrics."""


DEFAULTED_VARIABLES: Final = frozenset(
    {"VLLM_CACHE_ROOT", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_NO_USAGE_STATS", "VLLM_RPC_BASE_PATH"}
)
"""That the supervisor sets where a person doesn't."""
SEAMS: Final = (
    Seam(
        "vllm.v1.worker.gpu_worker:Worker.execute_model",
        "a step begins; wrapped by the state clock",
        parameters=("scheduler_output",),
    ),
    Seam(
        "vllm.v1.worker.gpu_worker:Worker.sample_tokens",
        "a step's second call; wrapped by the state clock",
        parameters=("grammar_output",),
    ),
    Seam("vllm.v1.worker.gpu_worker:Worker.init_device", "after it the worker's device is known"),
    Seam("vllm.v1.worker.gpu_worker:Worker.load_model", "phase Loading"),
    Seam("vllm.v1.worker.gpu_worker:Worker.determine_available_memory", "phase Warming"),
    Seam("vllm.v1.worker.gpu_worker:Worker.initialize_from_config", "KV cache size", parameters=("kv_cache_config",)),
    Seam("vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model", "after it the worker is ready"),
    Seam("vllm.v1.worker.gpu_worker:AsyncIntermediateTensors.wait_for_comm", "the wait for a hidden tensor"),
    Seam(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        "what a later stage receives into is made where it is missing",
        fields=("sync_and_gather_intermediate_tensors",),
        attributes_in_source=("device", "intermediate_tensors", "max_num_tokens", "model", "model_config"),
    ),
    Seam("vllm.distributed.parallel_state:GroupCoordinator.irecv_tensor_dict", "a hidden tensor is received"),
    Seam(
        "vllm.distributed.parallel_state:GroupCoordinator.isend_tensor_dict",
        "a hidden tensor is sent",
        parameters=("tensor_dict",),
    ),
    Seam("vllm.v1.worker.gpu_worker:Worker.get_model", "which layers it holds"),
    Seam(
        "vllm.v1.worker.worker_base:WorkerBase",
        "which stage and which of its workers this is",
        attributes_in_source=("device", "model_config", "parallel_config", "rank", "vllm_config"),
    ),
    Seam("vllm.config.parallel:ParallelConfig", "the same", fields=("pipeline_parallel_size", "tensor_parallel_size")),
    Seam("vllm.config:VllmConfig", "what our processor is made with", fields=("model_config", "parallel_config")),
    Seam("vllm.config.model:ModelConfig", "where the tokenizer is", fields=("get_vocab_size", "model")),
    Seam(
        "vllm.v1.core.sched.output:SchedulerOutput",
        "what a step holds, and which requests are over",
        fields=(
            "finished_req_ids",
            "num_scheduled_tokens",
            "scheduled_cached_reqs",
            "scheduled_new_reqs",
            "total_num_scheduled_tokens",
        ),
    ),
    Seam(
        "vllm.v1.core.sched.output:NewRequestData", "a request's first step", fields=("num_computed_tokens", "req_id")
    ),
    Seam("vllm.v1.core.sched.output:CachedRequestData", "later steps", fields=("num_computed_tokens", "req_ids")),
    Seam(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        "KV cache size",
        fields=("kv_cache_groups", "kv_cache_tensors", "num_blocks"),
    ),
    Seam("vllm.config.model:ModelConfig.get_layers_start_end_indices", "layers held", parameters=("parallel_config",)),
    Seam(
        "vllm.v1.core.sched.scheduler:Scheduler.schedule",
        "even cohorts are made round it",
        attributes_in_source=("current_step", "max_num_active_reqs", "parallel_config", "running"),
    ),
    Seam("vllm.v1.core.sched.async_scheduler:AsyncScheduler", "even cohorts where scheduling is asynchronous"),
    Seam(
        "vllm.v1.request:Request",
        "is it a decode whose last token is back?",
        fields=("num_tokens_with_spec",),
        attributes_in_source=(
            "is_prefill_chunk",
            "max_tokens",
            "next_decode_eligible_step",
            "num_computed_tokens",
            "num_output_placeholders",
            "num_prompt_tokens",
            "request_id",
        ),
    ),
    Seam(
        "vllm.config.scheduler:SchedulerConfig",
        "a scheduler of our own",
        fields=("async_scheduling", "scheduler_cls"),
    ),
    Seam(
        "vllm.engine.arg_utils:AsyncEngineArgs",
        "flags of the command line",
        fields=(
            "distributed_executor_backend",
            "dtype",
            "enable_prefix_caching",
            "master_addr",
            "master_port",
            "max_model_len",
            "max_num_seqs",
            "nnodes",
            "node_rank",
            "pipeline_parallel_size",
            "scheduler_cls",
            "served_model_name",
            "tensor_parallel_size",
        ),
    ),
    Seam(
        "vllm.envs:environment_variables",
        "environment of a node, and what a person may not set of it",
        fields=tuple(sorted((OWNED_VARIABLES.keys() | DEFAULTED_VARIABLES) - OUTSIDE_VLLMS_LIST)),
    ),
    Seam(
        "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateRequest",
        "ids in, ids out",
        fields=(
            "cache_salt",
            "model",
            "priority",
            "request_id",
            "sampling_params",
            "stream",
            "stream_options",
            "token_ids",
        ),
    ),
    Seam(
        "vllm.v1.sample.logits_processor:LogitsProcessor",
        "keyed noise",
        fields=("apply", "is_argmax_invariant", "update_state", "validate_params"),
    ),
    Seam(
        "vllm.config.parallel:ParallelConfig",
        "whether a worker samples",
        fields=("pipeline_parallel_size", "rank", "tensor_parallel_size"),
    ),
    Seam("vllm.v1.sample.logits_processor:BatchUpdate", "rows change places", fields=("added", "moved", "removed")),
    Seam("vllm.v1.sample.logits_processor:MoveDirectionality", "the same", fields=("SWAP",)),
    Seam(
        "vllm:SamplingParams",
        "what is asked for, what our processor is told, and what it would undo",
        fields=(
            "detokenize",
            "extra_args",
            "frequency_penalty",
            "ignore_eos",
            "logprobs",
            "max_tokens",
            "presence_penalty",
            "prompt_logprobs",
            "repetition_penalty",
            "stop_token_ids",
            "temperature",
        ),
    ),
    Seam(
        "vllm.v1.metrics.loggers",
        "figures of the engine that vLLM alone has",
        phrases=(
            "vllm:cache_config_info",
            "vllm:iteration_tokens_total",
            "vllm:kv_cache_usage_perc",
            "vllm:num_preemptions",
            "vllm:prefix_cache_hits",
            "vllm:prefix_cache_queries",
        ),
    ),
    Seam(
        "vllm.v1.executor.multiproc_executor",
        "who died first",
        phrases=("died unexpectedly", "Executor failed", "RPC call to", "WorkerProc initialization failed"),
    ),
    Seam(
        "vllm.v1.engine.exceptions",
        "an engine that gave up",
        phrases=("EngineCore encountered an issue", "EngineDeadError", "EngineGenerateError"),
    ),
    Seam("vllm.v1.engine.utils", "the same, at the start", phrases=("Engine core initialization failed",)),
    Seam("vllm.v1.core.kv_cache_utils", "class OutOfMemory", phrases=("No available memory for the cache blocks",)),
    Seam("vllm.v1.worker.utils", "the same", phrases=("Free memory on device",)),
    Seam("vllm.v1.worker.cpu_worker", "the same", phrases=("Available memory on node",)),
    Seam(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels.init_static_loras",
        "in the traceback of an adapter that can't be loaded",
    ),
    Seam(
        "vllm.entrypoints.serve.middleware.register",
        "a middleware of ours goes around all that the server answers",
        phrases=("in args.middleware", "app.add_middleware(imported)"),
    ),
    Seam("vllm.plugins:DEFAULT_PLUGINS_GROUP", "how the state clock is loaded"),
)


def broken_seams(seams: Iterable[Seam] = SEAMS) -> dict[str, str]:
    """What isn't there or looks otherwise, by path. Imports vLLM."""
    return {seam.path: fault for seam in seams if (fault := _fault(seam))}


def _fault(seam: Seam) -> str:
    try:
        found, owner = _find(seam.path)
    except (ImportError, AttributeError) as error:
        return f"not there: {error}"
    if seam.parameters:
        names = tuple(name for name in inspect.signature(inspect.unwrap(found)).parameters if name != "self")
        if names[: len(seam.parameters)] != seam.parameters:
            return f"takes {names}, not {seam.parameters}"
    if missing := [name for name in seam.fields if not _has(found, name)]:
        return f"has no {', '.join(missing)}"
    source = inspect.getsource(owner) if seam.attributes_in_source or seam.phrases else ""
    if missing := [name for name in seam.attributes_in_source if f"self.{name}" not in source]:
        return f"sets no {', '.join(missing)}"
    if missing := [phrase for phrase in seam.phrases if phrase not in source]:
        return f"says no {', '.join(missing)}"
    return ""


def _find(path: str) -> tuple[Any, Any]:
    """The object, and the class or module that it is in (a class is its own)."""
    module, _, names = path.partition(":")
    owner: Any = importlib.import_module(module)
    found: Any = owner
    for name in names.split(".") if names else ():
        owner, found = found, getattr(found, name)
    return found, found if inspect.isclass(found) else owner


def _has(found: Any, name: str) -> bool:
    if isinstance(found, dict):
        return name in found
    annotated = any(name in vars(base).get("__annotations__", {}) for base in getattr(found, "__mro__", ()))
    return annotated or hasattr(found, name)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(broken_seams()) + "\n")
