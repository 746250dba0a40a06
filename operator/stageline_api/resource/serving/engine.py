"""`spec.engine` and `spec.parallelism`: the engine of the model, and the number of stages."""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from stageline_api.resource.base import SpecBase, cel, cel_extra, check_absolute_path, check_pattern
from stageline_api.resource.field_problem import FieldProblem, show_value
from stageline_api.resource.serving import vllm_arguments
from stageline_api.resource.serving.model import SERVED_NAME_PATTERN
from stageline_api.resource.serving.speculative import SpeculativeSpec
from stageline_api.runtime_config import RuntimeConfig

MOST_STAGES: Final = 64

MOST_RANKS: Final = 8
MOST_ARGUMENTS: Final = 48
MOST_ADAPTERS: Final = 16

_GRAPHS_OF_RANKS: Final = (
    "can't be had where parallelism.tensor or parallelism.expert is above 1, whose exchanges are not captured: "
    "auto or off"
)
_EXPERT_OR_TENSOR: Final = "can't be above 1 where parallelism.tensor is: ranks share each layer, or its experts alone"
_EXPERT_OF_VLLM: Final = (
    "is only for engine.name: stageline: vllm divides experts among the devices of parallelism.tensor, with "
    "--enable-expert-parallel in engine.extraArgs"
)
_ONLY_VLLM: Final = "is only for engine.name: vllm"
_ARGUMENT_RULE: Final = "is set by the operator, not by extraArgs"
_GRAPHS_RULE: Final = "has no meaning under vllm, which captures by its own rules: see extraArgs --compilation-config"
_DEVICE_RULE: Final = "has no meaning under vllm, whose image is made for one kind of device"
_SPECULATIVE_RULE: Final = (
    "is refused under vllm: with a pipeline its speculation and continued answers exclude each other"
)
_ADAPTER_NAME_RULE: Final = (
    'must start with a letter or digit and hold only letters, digits, ".", "_", "/", ":" and "-"'
)
_SERVED_ADAPTER_RULE: Final = "is the name that the model itself is served under (spec.model.servedName)"
_ONE_ADAPTER_RULE: Final = "is given twice: each adapter has a name of its own"


def _default(field: str) -> int:
    """The runtime's default, so that both always agree."""
    value = RuntimeConfig.model_fields[field].default
    assert isinstance(value, int), field
    return value


def _image(image: str) -> str:
    return check_pattern(image, r"^\S+$", "must be the name of a container image, without spaces")


def _argument(word: str) -> str:
    problem = vllm_arguments.argument_problem(word)
    if problem is not None:
        raise ValueError(problem)
    return word


def _adapter_name(name: str) -> str:
    return check_pattern(name, SERVED_NAME_PATTERN, _ADAPTER_NAME_RULE)


VllmArgument = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_argument)]


class LoraAdapterSpec(SpecBase):
    """A LoRA adapter with a model name of its own."""

    name: Annotated[str, AfterValidator(_adapter_name)] = Field(
        min_length=1,
        max_length=128,
        json_schema_extra={"pattern": SERVED_NAME_PATTERN},
        description="Name that clients use as `model` for this adapter. Required.",
    )
    path: Annotated[str, AfterValidator(check_absolute_path)] = Field(
        min_length=1,
        max_length=1024,
        json_schema_extra={"pattern": "^/"},
        description=(
            "Absolute path of the adapter's directory in the containers, on a volume of `template.volumes`. Required."
        ),
    )


class EngineSpec(SpecBase):
    """How the model is run."""

    name: Literal["stageline", "vllm"] = Field(
        default="stageline",
        description=(
            "`stageline`, the own runtime, or `vllm`: vLLM's pipeline, with one vLLM node in each stage pod "
            "(docs/engines.md). Changing it is an ordinary rollout. Default `stageline`."
        ),
    )
    image: Annotated[str | None, AfterValidator(_image)] = Field(
        default=None,
        min_length=1,
        max_length=512,
        description=(
            "Image of the `stage` containers, for `vllm` only. `vllm/vllm-openai` works unchanged: an init container "
            "adds Stageline's files. Default: `template.image`, which must then hold vLLM and Stageline, otherwise "
            "the chart's `vllm.image`."
        ),
    )
    extra_args: Annotated[tuple[VllmArgument, ...], Field(strict=False)] = Field(
        default=(),
        max_length=MOST_ARGUMENTS,
        json_schema_extra=cel_extra(
            cel(f"!self.exists(word, word.matches('{vllm_arguments.owned_pattern()}'))", _ARGUMENT_RULE)
        ),
        description=(
            "Arguments added to `vllm serve`, for `vllm` only: quantization, memory, kernels. Arguments that the "
            "operator or another field sets are refused. Default: none; at most 48, each up to 1024 characters."
        ),
    )
    lora_adapters: Annotated[tuple[LoraAdapterSpec, ...], Field(strict=False)] = Field(
        default=(),
        max_length=MOST_ADAPTERS,
        description=(
            "LoRA adapters that are served as models with their own names, for `vllm` only. Default: none; at most 16."
        ),
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description=(
            "Number format of weights, activations and KV cache. Default `auto`: the model's own. On CPUs `stageline` "
            "uses float32 instead of float16, and instead of bfloat16 if the CPU lacks bfloat16 units (avx512_bf16, "
            "amx_bf16, ARM bf16); the stages' status shows the format and why. `float32` doubles the memory of a "
            "bfloat16 model and makes greedy answers independent of the number of stages."
        ),
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description=(
            "Maximum prompt plus output, in tokens. A smaller value needs less KV cache. Default: the model's context "
            "length, which it may not exceed. Between 1 and 16777216."
        ),
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description=(
            "Maximum running requests of a group; more wait in its queue. They are divided over as many microbatches "
            "as there are stages. Default: 256 if every stage has a GPU, otherwise 16; at most `maxNumBatchedTokens`. "
            "Between 1 and 1024."
        ),
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        le=65_536,
        description=(
            "Maximum tokens of one step; longer prompts are prefilled in chunks. A larger value prefills faster and "
            "delays running answers. Default: 8192 if every stage has a GPU, otherwise 512; at least `maxNumSeqs`. "
            "Between 1 and 65536."
        ),
    )
    prefix_cache: bool = Field(
        default=True,
        description=(
            "Whether requests reuse the KV cache of earlier requests with the same prefix. Answers do not change. All "
            "clients share the cache: a client that measures latency can infer that a prefix was used before, unless "
            "requests set `cache_salt`. Default true."
        ),
    )
    generation_config: Literal["model", "none"] = Field(
        default="model",
        description=(
            "Default sampling parameters of requests that don't set them. `model`: those of the model's "
            "`generation_config.json`, as vLLM's `--generation-config auto`. `none`: temperature 1. Default `model`."
        ),
    )
    graphs: Literal["auto", "off", "piecewise", "full"] = Field(
        default="auto",
        description=(
            "CUDA graph capture. `full`: whole layers for decode steps, `piecewise` for others. `piecewise`: all but "
            "attention. `off`: none. Default `auto`: `full` if all stages have a device (mixtures of experts: only "
            "bfloat16 on sm_90 or sm_100), otherwise `off`. If a stage can't capture, `piecewise` and `full` end the "
            "group with BadConfig."
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description=(
            "Device of the stages. Default `auto`: CUDA if the container has a device (request `nvidia.com/gpu` in "
            "`resources`), otherwise the CPU. `cuda` requests `nvidia.com/gpu` itself, unless `resources` name an "
            "NVIDIA device; a stage without a device then ends with BadConfig. docs/gpu.md shows which parts have run "
            "on GPUs."
        ),
    )
    speculative: SpeculativeSpec | None = Field(
        default=None,
        description=(
            "Speculative decoding: several drafted tokens are verified in one step. Answers do not change (in float32 "
            "token for token). It helps most for answers that copy from their prompt and with fewer requests than "
            "stages. Default: off."
        ),
    )
    seed: int = Field(
        default=_default("seed"),
        ge=0,
        le=2_147_483_647,
        description=(
            "Base seed of the group's random choices; a request's `seed` decides its own sampling. Default 0, between "
            "0 and 2147483647."
        ),
    )


class ParallelismSpec(SpecBase):
    """How one group divides the model."""

    pipeline: int = Field(
        default=1,
        ge=1,
        le=MOST_STAGES,
        description=(
            "Number of stages; each is one pod. At most the model's number of layers. If `stages` is set, its length "
            "must equal this. Default 1, between 1 and 64."
        ),
    )
    tensor: int = Field(
        default=1,
        ge=1,
        le=MOST_RANKS,
        description=(
            "Tensor parallelism: number of ranks that share each layer of a stage (docs/parallelism.md). Under "
            "`stageline` ranks are processes of one pod, on its CPUs or with one GPU each; the number must divide the "
            "model's heads and sizes, and mixtures of experts take 1. Under `vllm` ranks are GPUs. A limit of "
            "`nvidia.com/gpu` must equal it. Default 1, between 1 and 8."
        ),
    )
    expert: int = Field(
        default=1,
        ge=1,
        le=MOST_RANKS,
        description=(
            "Expert parallelism under `stageline`: number of ranks that divide the experts of each layer "
            "(docs/parallelism.md). Ranks are processes of one pod, each with all other weights and its own requests. "
            "Must divide the number of experts; `tensor` must be 1. A limit of `nvidia.com/gpu` must equal it. "
            "Default 1, between 1 and 8."
        ),
    )

    @property
    def devices_per_stage(self) -> int:
        """Devices of each stage, if it runs on devices."""
        return self.tensor * self.expert


_LONE_RANKS: Final = "self.engine.name == 'vllm' || (self.parallelism.tensor == 1 && self.parallelism.expert == 1)"

ENGINE_RULES: Final = (
    cel("self.engine.name == 'vllm' || !has(self.engine.image)", _ONLY_VLLM, ".engine.image"),
    cel(
        "self.engine.name == 'vllm' || !has(self.engine.extraArgs) || size(self.engine.extraArgs) == 0",
        _ONLY_VLLM,
        ".engine.extraArgs",
    ),
    cel(
        "self.engine.name == 'vllm' || !has(self.engine.loraAdapters) || size(self.engine.loraAdapters) == 0",
        _ONLY_VLLM,
        ".engine.loraAdapters",
    ),
    cel(
        "!has(self.engine.loraAdapters) || self.engine.loraAdapters.all(one, "
        "self.engine.loraAdapters.exists_one(other, other.name == one.name))",
        _ONE_ADAPTER_RULE,
        ".engine.loraAdapters",
    ),
    cel("self.engine.name == 'stageline' || self.engine.graphs == 'auto'", _GRAPHS_RULE, ".engine.graphs"),
    cel("self.engine.name == 'stageline' || self.engine.device == 'auto'", _DEVICE_RULE, ".engine.device"),
    cel("self.engine.name == 'stageline' || !has(self.engine.speculative)", _SPECULATIVE_RULE, ".engine.speculative"),
    cel("self.parallelism.expert == 1 || self.parallelism.tensor == 1", _EXPERT_OR_TENSOR, ".parallelism.expert"),
    cel("self.parallelism.expert == 1 || self.engine.name != 'vllm'", _EXPERT_OF_VLLM, ".parallelism.expert"),
    cel(f"{_LONE_RANKS} || self.engine.graphs in ['auto', 'off']", _GRAPHS_OF_RANKS, ".engine.graphs"),
)
"""Rules that the API server checks between the engine's name and other fields, as `engine_problems` does."""


def engine_problems(engine: EngineSpec, parallelism: ParallelismSpec, served_name: str | None) -> list[FieldProblem]:
    """Fields that the engine does not support."""
    ranks = _problems_of_experts(engine, parallelism)
    if engine.name == "stageline":
        given = {"image": engine.image, "extraArgs": engine.extra_args, "loraAdapters": engine.lora_adapters}
        problems = [FieldProblem(path=f"spec.engine.{name}", rule=_ONLY_VLLM) for name, it in given.items() if it]
        return ranks + problems + (_problems_of_ranks(engine) if parallelism.devices_per_stage != 1 else [])
    problems = ranks
    for name, value, rule in (("graphs", engine.graphs, _GRAPHS_RULE), ("device", engine.device, _DEVICE_RULE)):
        if value != "auto":
            problems.append(FieldProblem(path=f"spec.engine.{name}", value=show_value(value), rule=rule))
    if engine.speculative is not None:
        problems.append(FieldProblem(path="spec.engine.speculative", rule=_SPECULATIVE_RULE))
    return problems + _adapter_problems(engine.lora_adapters, served_name)


def _problems_of_experts(engine: EngineSpec, parallelism: ParallelismSpec) -> list[FieldProblem]:
    """Fields that exclude `parallelism.expert` above 1."""
    if parallelism.expert == 1:
        return []
    rules = [_EXPERT_OR_TENSOR] * (parallelism.tensor != 1) + [_EXPERT_OF_VLLM] * (engine.name == "vllm")
    return [
        FieldProblem(path="spec.parallelism.expert", value=show_value(parallelism.expert), rule=rule) for rule in rules
    ]


def _problems_of_ranks(engine: EngineSpec) -> list[FieldProblem]:
    """Fields that exclude several ranks in Stageline's own engine, as far as the spec shows."""
    if engine.graphs in ("auto", "off"):
        return []
    return [FieldProblem(path="spec.engine.graphs", value=show_value(engine.graphs), rule=_GRAPHS_OF_RANKS)]


def _adapter_problems(adapters: tuple[LoraAdapterSpec, ...], served_name: str | None) -> list[FieldProblem]:
    problems: list[FieldProblem] = []
    taken = {served_name}
    for index, adapter in enumerate(adapters):
        path = f"spec.engine.loraAdapters[{index}].name"
        if adapter.name == served_name:
            problems.append(FieldProblem(path=path, value=show_value(adapter.name), rule=_SERVED_ADAPTER_RULE))
        elif adapter.name in taken:
            problems.append(FieldProblem(path=path, value=show_value(adapter.name), rule=_ONE_ADAPTER_RULE))
        taken.add(adapter.name)
    return problems
