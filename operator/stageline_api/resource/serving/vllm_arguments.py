"""`spec.engine.extraArgs`: a user's arguments for `vllm serve`, and the arguments that the operator sets.

An argument is refused by name, with an alternative, if it would move a port, change the members of the group or
override a field of the spec. vLLM reads `--node_rank` as `--node-rank` and accepts an unambiguous prefix of a name, of
`-tp` and `--no-enable-lora` too, so these are refused as well. Other arguments are passed on unchanged; vLLM reports
unknown ones. `tests/vllm_engine/recorded` lists all arguments of the supported vLLM and which of them are allowed.
"""

from typing import Final

_GROUP: Final = "is set by the operator: it follows from the group's pods"
_EDGE: Final = "belongs to vLLM's HTTP server, which answers the group's own engine only: set it at the gateway"
_UNKNOWN_PROCESS: Final = "would start processes outside the group's pods"
_SPECULATION: Final = "is refused: with a pipeline vLLM's speculation and continued answers exclude each other"
_QUEUE: Final = "belongs to the engine container: requests wait there, spec.engine.maxNumSeqs run"
_SOCKETS: Final = "would open sockets that the group's network policy doesn't know"
_LAST_WORDS: Final = "affects vLLM's log, from which the operator reads a failure's cause"

OWNED_ARGUMENTS: Final[dict[str, str]] = {
    "--model": "is spec.model.source",
    "--served-model-name": "is spec.model.servedName",
    "--tokenizer": "is the model's own: template and tokenizer stay with the engine container",
    "--tokenizer-mode": "is the model's own: template and tokenizer stay with the engine container",
    "--skip-tokenizer-init": "is the model's own: template and tokenizer stay with the engine container",
    "--hf-token": "would show a secret on a command line: files are fetched before vLLM starts",
    "--hf-config-path": "is the model's own",
    "--runner": "is generate: vLLM gets no other tasks",
    "--convert": "is none: vLLM gets only generation tasks",
    "--revision": "is spec.model.revision",
    "--code-revision": "is spec.model.revision",
    "--tokenizer-revision": "is spec.model.revision",
    "--download-dir": "is spec.model.cache",
    "--dtype": "is spec.engine.dtype",
    "--max-model-len": "is spec.engine.maxModelLen",
    "--max-num-seqs": "is spec.engine.maxNumSeqs",
    "--max-num-batched-tokens": "is spec.engine.maxNumBatchedTokens",
    "--enable-prefix-caching": "is spec.engine.prefixCache",
    "--seed": "is spec.engine.seed",
    "--lora-modules": "is spec.engine.loraAdapters",
    "--enable-lora": "is spec.engine.loraAdapters",
    "--max-loras": "is spec.engine.loraAdapters",
    "--pipeline-parallel-size": "is spec.parallelism.pipeline",
    "--tensor-parallel-size": "is spec.parallelism.tensor",
    "--nnodes": _GROUP,
    "--node-rank": _GROUP,
    "--master-addr": _GROUP,
    "--master-port": _GROUP,
    "--headless": _GROUP,
    "--distributed-executor-backend": _GROUP,
    "--device-ids": _GROUP,
    "--prefill-context-parallel-size": "would change the number of workers of a stage: use spec.parallelism.tensor",
    "--distributed-timeout-seconds": "is spec.timeouts.stepSeconds",
    "--cpu-distributed-timeout-seconds": "is spec.timeouts.stepSeconds",
    "--data-parallel-size": f"{_UNKNOWN_PROCESS}; use spec.replicas",
    "--data-parallel-size-local": f"{_UNKNOWN_PROCESS}; use spec.replicas",
    "--data-parallel-rank": f"{_UNKNOWN_PROCESS}; use spec.replicas",
    "--data-parallel-start-rank": f"{_UNKNOWN_PROCESS}; use spec.replicas",
    "--data-parallel-address": f"{_UNKNOWN_PROCESS}; use spec.replicas",
    "--data-parallel-rpc-port": f"{_UNKNOWN_PROCESS}; use spec.replicas",
    "--data-parallel-backend": f"{_UNKNOWN_PROCESS}; use spec.replicas",
    "--data-parallel-hybrid-lb": f"{_UNKNOWN_PROCESS}; use spec.replicas",
    "--data-parallel-external-lb": f"{_UNKNOWN_PROCESS}; use spec.replicas",
    "--data-parallel-multi-port-external-lb": f"{_UNKNOWN_PROCESS}; use spec.replicas",
    "--data-parallel-supervisor-port": f"{_UNKNOWN_PROCESS}; use spec.replicas",
    "--enable-elastic-ep": _UNKNOWN_PROCESS,
    "--api-server-count": _UNKNOWN_PROCESS,
    "--worker-extension-cls": "is set by the operator, to time vLLM's stages",
    "--worker-cls": "is set by the operator, to time vLLM's stages",
    "--scheduler-cls": "is set by the operator, to keep the microbatches even",
    "--logits-processors": "is set by the operator, to resume answers",
    "--scheduling-policy": "is set by the operator, to keep requests' priorities",
    "--async-scheduling": "is off, because the operator needs the model runner that can resume answers",
    "--logprobs-mode": "is set by the operator, to report log probabilities",
    "--max-logprobs": "is set by the operator, to report log probabilities",
    "--enable-prompt-tokens-details": "is set by the operator, to count cached tokens",
    "--speculative-config": _SPECULATION,
    "--spec-method": _SPECULATION,
    "--spec-model": _SPECULATION,
    "--spec-tokens": _SPECULATION,
    "--max-num-active-seqs": _QUEUE,
    "--max-num-queued-reqs": _QUEUE,
    "--max-num-queued-tokens": _QUEUE,
    "--disable-log-stats": "would remove metrics that the engine's own are derived from",
    "--logging-config": _LAST_WORDS,
    "--log-config-file": _LAST_WORDS,
    "--log-level": _LAST_WORDS,
    "--shutdown-timeout": "is set by the operator: the engine container drains the group",
    "--kv-transfer-config": _SOCKETS,
    "--kv-events-config": _SOCKETS,
    "--ec-transfer-config": _SOCKETS,
    "--weight-transfer-config": _SOCKETS,
    "--help": "only prints information: run vLLM's image itself",
    "--config": "is a file of arguments, which could not be checked: write them out",
    "--grpc": _EDGE,
    "--grpc-port": _EDGE,
    "--host": _EDGE,
    "--port": _EDGE,
    "--uds": _EDGE,
    "--enable-scale-out": _EDGE,
    "--tokens-only": _EDGE,
    "--api-key": _EDGE,
    "--root-path": _EDGE,
    "--middleware": _EDGE,
    "--ssl-keyfile": _EDGE,
    "--ssl-certfile": _EDGE,
    "--ssl-ca-certs": _EDGE,
    "--ssl-cert-reqs": _EDGE,
    "--chat-template": _EDGE,
    "--disable-fastapi-docs": _EDGE,
    "--disable-uvicorn-access-log": _EDGE,
}
"""Arguments that users can't set, and why: a clause that follows the name."""

OWNED_SHORT_ARGUMENTS: Final[dict[str, str]] = {
    "-pp": "--pipeline-parallel-size",
    "-tp": "--tensor-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-pcp": "--prefill-context-parallel-size",
    "-asc": "--api-server-count",
    "-sc": "--speculative-config",
    "-h": "--help",
}


def argument_problem(word: str) -> str | None:
    """Why this word can't be passed to vLLM; None if it can, or is the value of another."""
    name = word.partition("=")[0].partition(".")[0]
    if not name.startswith("-") or _is_number(name):
        return None
    if not name.startswith("--"):
        return _short_problem(name)
    spelled = name.replace("_", "-")
    if (owner := OWNED_ARGUMENTS.get(spelled)) is not None:
        return f"{spelled} {owner}"
    if spelled == "--":
        return "-- would end the list of arguments"
    negated = "--" + spelled.removeprefix("--no-")
    if (owner := OWNED_ARGUMENTS.get(negated)) is not None:
        return f"{spelled} is the opposite of {negated}, which {owner}"
    for owned, owner in OWNED_ARGUMENTS.items():
        if owned.startswith(spelled):
            return f"vLLM may read it as {owned}, which {owner}: write the argument's whole name"
        if spelled.startswith("--no-") and owned.startswith(negated):
            return f"vLLM may read it as the opposite of {owned}, which {owner}: write the argument's whole name"
    return None


def _short_problem(name: str) -> str | None:
    """A value may follow a single letter without a space (`-n2`), and a prefix may stand for the name (`-t`)."""
    owned = OWNED_SHORT_ARGUMENTS.get(name) or OWNED_SHORT_ARGUMENTS.get(name[:2])
    if owned is not None:
        return f"{name} stands for {owned}, which {OWNED_ARGUMENTS[owned]}"
    longer = next((short for short in OWNED_SHORT_ARGUMENTS if short.startswith(name)), None)
    if longer is None:
        return None
    owned = OWNED_SHORT_ARGUMENTS[longer]
    return f"vLLM may read it as {longer}, {owned}, which {OWNED_ARGUMENTS[owned]}: write the argument's whole name"


def _is_number(word: str) -> bool:
    return word[1:2].isdigit()


def owned_pattern() -> str:
    """The pattern that the API server refuses: the names in both spellings. Only this module refuses their prefixes."""
    names = [name[2:].replace("-", "[-_]") for name in OWNED_ARGUMENTS]
    short = [name[1:] for name in OWNED_SHORT_ARGUMENTS]
    return f"^(--(no[-_])?({'|'.join(names)})|-({'|'.join(short)}))([=.].*)?$"
