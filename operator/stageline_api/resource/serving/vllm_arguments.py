"""`spec.engine.extraArgs`: what a person may hand to `vllm serve`, and what the operator decides by itself.

An argument that would move a port, change who is in the group or undo a field of the spec is refused by name, with what
to write instead. vLLM reads `--node_rank` as `--node-rank` and takes an unambiguous beginning for the whole name, of
`-tp` and `--no-enable-lora` too, so these are refused as well. What is left is handed on word by word; vLLM itself says
whether it knows it. `tests/vllm_engine/recorded` lists all arguments of the supported vLLM and which of them pass.
"""

from typing import Final

_GROUP: Final = "is decided by the operator: it follows from the group's pods"
_EDGE: Final = "belongs to vLLM's HTTP server, which answers the group's own engine only: set it at the gateway"
_UNKNOWN_PROCESS: Final = "would start processes that no pod of the group accounts for"
_SPECULATION: Final = "is refused: with a pipeline vLLM's speculation and continued answers exclude each other"
_QUEUE: Final = "is the engine container's: requests wait there, spec.engine.maxNumSeqs run"
_SOCKETS: Final = "would open sockets that the group's network policy doesn't know"
_LAST_WORDS: Final = "is how a failure's cause is read from vLLM's log: it is the operator's"

OWNED_ARGUMENTS: Final[dict[str, str]] = {
    "--model": "is spec.model.source",
    "--served-model-name": "is spec.model.servedName",
    "--tokenizer": "is the model's own: template and tokenizer stay with the engine container",
    "--tokenizer-mode": "is the model's own: template and tokenizer stay with the engine container",
    "--skip-tokenizer-init": "is the model's own: template and tokenizer stay with the engine container",
    "--hf-token": "would show a secret on a command line: files are fetched before vLLM starts",
    "--hf-config-path": "is the model's own",
    "--runner": "is generate: nothing else is asked of vLLM",
    "--convert": "is none: nothing but generation is asked of vLLM",
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
    "--prefill-context-parallel-size": "would change how many workers a stage has: that is spec.parallelism.tensor",
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
    "--worker-extension-cls": "is where vLLM's stages are timed: it is the operator's",
    "--worker-cls": "is where vLLM's stages are timed: it is the operator's",
    "--scheduler-cls": "is how the cohorts are kept even: it is the operator's",
    "--logits-processors": "is how answers are continued: it is the operator's",
    "--scheduling-policy": "is how requests' priorities are kept: it is the operator's",
    "--async-scheduling": "is off, for the model runner that answers can be continued with: it is the operator's",
    "--logprobs-mode": "is how log probabilities are reported: it is the operator's",
    "--max-logprobs": "is how log probabilities are reported: it is the operator's",
    "--enable-prompt-tokens-details": "is how cached tokens are counted: it is the operator's",
    "--speculative-config": _SPECULATION,
    "--spec-method": _SPECULATION,
    "--spec-model": _SPECULATION,
    "--spec-tokens": _SPECULATION,
    "--max-num-active-seqs": _QUEUE,
    "--max-num-queued-reqs": _QUEUE,
    "--max-num-queued-tokens": _QUEUE,
    "--disable-log-stats": "would end the series that the engine's own are made from",
    "--logging-config": _LAST_WORDS,
    "--log-config-file": _LAST_WORDS,
    "--log-level": _LAST_WORDS,
    "--shutdown-timeout": "is how a group drains: the engine container waits for its answers",
    "--kv-transfer-config": _SOCKETS,
    "--kv-events-config": _SOCKETS,
    "--ec-transfer-config": _SOCKETS,
    "--weight-transfer-config": _SOCKETS,
    "--help": "is a question: ask vLLM's image itself",
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
"""Each argument that is not a person's to give, and why: a half-sentence that follows its name."""

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
    """Why this word can't be handed to vLLM; None when it can, or is the value of another."""
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
    """A value may follow a single letter without a space (`-n2`), and a beginning may stand for the whole (`-t`)."""
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
    """What the API server refuses: the same names in both spellings. Their beginnings are refused before it only."""
    names = [name[2:].replace("-", "[-_]") for name in OWNED_ARGUMENTS]
    short = [name[1:] for name in OWNED_SHORT_ARGUMENTS]
    return f"^(--(no[-_])?({'|'.join(names)})|-({'|'.join(short)}))([=.].*)?$"
