"""The command line of the stand-in: of vLLM's arguments those that it knows, read as strictly as vLLM reads them."""

import argparse
import re
from collections.abc import Sequence

_BEFORE_DOT = re.compile(r"(?<=--)[^\.=]*")


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """What follows `serve`; ends the process with status 2, as argparse does, at an argument that vLLM doesn't have."""
    parser = argparse.ArgumentParser(prog="vllm serve")
    parser.add_argument("model")
    for name in ("--served-model-name", "--lora-modules"):
        parser.add_argument(name, nargs="+", default=[])
    for name in ("--dtype", "--distributed-executor-backend", "--scheduler-cls", "--scheduling-policy", "--host",
                 "--quantization", "--kv-cache-dtype", "--kv-cache-memory-bytes", "--compilation-config",
                 "--master-addr", "--logprobs-mode"):  # fmt: skip
        parser.add_argument(name)
    parser.add_argument("--logits-processors", nargs="+", default=[])
    parser.add_argument("--middleware", action="append", default=[])
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--nnodes", "-n", type=int, default=1)
    parser.add_argument("--node-rank", "-r", type=int, default=0)
    for name, default in (("--master-port", 29501), ("--max-model-len", 2048), ("--max-num-seqs", 256),
                          ("--max-num-batched-tokens", 2048), ("--port", 8000), ("--seed", 0), ("--max-loras", 1),
                          ("--max-lora-rank", 16), ("--max-logprobs", 20), ("--distributed-timeout-seconds", 600),
                          ("--cpu-distributed-timeout-seconds", 1800)):  # fmt: skip
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    for name in ("--enable-prefix-caching", "--enable-lora", "--enforce-eager", "--async-scheduling",
                 "--enable-prompt-tokens-details", "--enable-log-requests"):  # fmt: skip
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=False)
    for name in ("--headless", "--enable-scale-out", "--disable-uvicorn-access-log", "--disable-log-stats"):
        parser.add_argument(name, action="store_true")
    given = parser.parse_args([_BEFORE_DOT.sub(lambda found: found[0].replace("_", "-"), word, count=1)
                               if word.startswith("--") else word for word in words])  # fmt: skip
    _check(parser, given)
    return given


def _check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    world = given.pipeline_parallel_size * given.tensor_parallel_size
    if given.nnodes > 1 and given.distributed_executor_backend != "mp":
        parser.error("nnodes > 1 can only be set when distributed executor backend is mp.")
    if world % given.nnodes:
        parser.error(f"world_size {world} must be divisible by nnodes {given.nnodes}")
    if not 0 <= given.node_rank < given.nnodes:
        parser.error(f"node_rank {given.node_rank} is not between 0 and {given.nnodes - 1}")
    if given.lora_modules and not given.enable_lora:
        parser.error("--lora-modules needs --enable-lora")
    given.served_names = given.served_model_name or [given.model]
    given.adapters = dict(module.partition("=")[::2] for module in given.lora_modules)
