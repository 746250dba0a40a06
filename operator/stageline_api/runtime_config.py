"""The resolved config: the planner writes it into a group's ConfigMap, and every container reads it.

All defaults have been applied by then, except those that depend on the devices that stages find. Units are in the
names.
"""

from typing import Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

COMPILED_SUBDIRECTORY: Final = "compiled"
"""Directory of the model cache for compiled kernels; stages may write it even if models are read-only."""


class LayerRange(BaseModel):
    """Layers of one stage, both ends included, counted from zero."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: int = Field(ge=0)
    last: int = Field(ge=0)

    @property
    def count(self) -> int:
        return self.last - self.first + 1


class Timeouts(BaseModel):
    """How long each phase may take before it counts as failed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rendezvous_seconds: float = 120.0
    load_seconds: float = 1800.0
    step_seconds: float = 60.0
    drain_seconds: float = 30.0


class StepLimits(NamedTuple):
    """How many requests of a group run at once, and how many tokens one step may carry."""

    max_num_seqs: int
    max_num_batched_tokens: int

    @classmethod
    def of(cls, max_num_seqs: int | None, max_num_batched_tokens: int | None, *, on_gpus: bool) -> "StepLimits":
        """What is given, and vLLM's defaults for GPUs or small ones for CPUs in place of None.

        A default gives way to the other number that is given: each request takes a token of a step.
        """
        usual = _GPU_LIMITS if on_gpus else _CPU_LIMITS
        sequences = max_num_seqs or min(usual.max_num_seqs, max_num_batched_tokens or usual.max_num_batched_tokens)
        return cls(sequences, max_num_batched_tokens or max(usual.max_num_batched_tokens, sequences))


_CPU_LIMITS: Final = StepLimits(16, 512)
_GPU_LIMITS: Final = StepLimits(256, 8192)


class LoraAdapter(BaseModel):
    """An adapter loaded beside the model: its served name, and its directory in the containers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    path: str


class SpeculativeConfig(BaseModel):
    """Speculative decoding: drafts by lookup in a request's own tokens, or by a smaller model on the last stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = 15
    """Maximum drafts of one row."""
    min_match: int = 1
    """Minimum n-gram length that lookup matches."""
    recent_answers: int = 0
    """Finished answers that lookup may copy from, besides the request itself."""
    draft_source: str | None = None
    """Canonical source URL of the draft model; None uses lookup."""


class TlsConfig(BaseModel):
    """Mutual TLS between the pods of the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: str
    """Directory with `tls.crt`, `tls.key` and `ca.crt`."""
    name: str
    """The DNS name that every certificate must have."""


class RuntimeConfig(BaseModel):
    """Everything that the engine and the stages of one group need, besides the contract's environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_name: str
    """The PipelineModel's name."""
    namespace: str
    served_name: str
    source: str
    """Canonical source URL (`stageline_api.resource.serving.model_source`)."""
    cache_dir: str
    """Root of the model cache: written by `stageline prepare`, and by stages that fetch their own shards."""
    cache_limit_bytes: int | None = None
    """Maximum size of the cache; beyond it the least recently used models are deleted. None: no limit."""
    stage_count: int
    engine_name: Literal["stageline", "vllm"] = "stageline"
    """Stageline's own runtime, or vLLM under a supervisor in each stage's container."""
    extra_args: tuple[str, ...] = ()
    """Arguments added to `vllm serve`; checked by `stageline_api.resource.serving.vllm_arguments`."""
    lora_adapters: tuple[LoraAdapter, ...] = ()
    """Served beside the model, each under its own name; vLLM only."""
    tensor: int = 1
    """Ranks of a stage that share each of its layers: processes of the pod, or devices under vLLM."""
    expert: int = 1
    """Ranks of a stage that divide the experts of a mixture; each has all other weights, and its own requests."""
    dtype: str = "auto"
    """`auto` (the model's own), `float32` or `bfloat16`."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None takes the model's context length."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    """Maximum tokens of one step; a longer prompt is prefilled in chunks. None: see `step_limits`."""
    prefix_cache: bool = True
    """Reuse the KV cache of an earlier request with the same prefix."""
    generation_config: Literal["model", "none"] = "none"
    """Whether the model's `generation_config.json` gives the default sampling parameters. A config from before this
    field exists has `none`.
    """
    graphs: Literal["auto", "off", "piecewise", "full"] = "auto"
    """`auto`, `off`, `piecewise` or `full`: how much of a step runs as captured graphs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the stages; `auto` uses a visible CUDA device."""
    seed: int = 0
    speculative: SpeculativeConfig | None = None
    """None: no speculative decoding."""
    stage_layers: tuple[LayerRange, ...] | None = None
    """Explicit cut, one range per stage; None lets the engine cut."""
    network_interface: str | None = None
    tls: TlsConfig | None = None
    """None: traffic between pods is not encrypted."""
    timeouts: Timeouts = Timeouts()

    def step_limits(self, *, on_gpus: bool) -> StepLimits:
        """The limits of the group; `on_gpus` says whether every stage computes on a GPU."""
        return StepLimits.of(self.max_num_seqs, self.max_num_batched_tokens, on_gpus=on_gpus)

    @property
    def stage_ranks(self) -> int:
        """How many processes a stage of Stageline's own engine has; vLLM's nodes start their own."""
        return self.tensor_ranks * self.expert

    @property
    def tensor_ranks(self) -> int:
        """How many of these share each layer."""
        return self.tensor if self.engine_name == "stageline" else 1
