"""`spec.engine` and `spec.parallelism`: what runs the model, and over how many stages."""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from stageline_api.resource.base import SpecBase, cel, cel_extra
from stageline_api.runtime_config import RuntimeConfig

MOST_STAGES: Final = 64

_NO_TENSOR: Final = "tensor parallelism is not built yet: must be 1"
_ONE_ENGINE: Final = 'must be "stageline": no other engine is built yet'


def _default(field: str) -> int:
    """The runtime's own default, so that the two can't drift apart."""
    value = RuntimeConfig.model_fields[field].default
    assert isinstance(value, int), field
    return value


def _engine_name(name: str) -> str:
    if name != "stageline":
        raise ValueError(_ONE_ENGINE)
    return name


def _tensor(size: int) -> int:
    if size != 1:
        raise ValueError(_NO_TENSOR)
    return size


class EngineSpec(SpecBase):
    """How the model is run."""

    name: Annotated[str, AfterValidator(_engine_name)] = Field(
        default="stageline",
        max_length=63,
        json_schema_extra=cel_extra(cel("self == 'stageline'", _ONE_ENGINE)),
        description='Engine that runs the model. Default and only value so far: "stageline".',
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description=(
            "Number format of weights, activations and KV cache. Default `auto`, the model's own. `float32` doubles "
            "the memory of a bfloat16 model and keeps greedy answers the same whatever the number of stages."
        ),
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description=(
            "Longest prompt plus output, in tokens. Default: the model's context length, which it may not exceed. "
            "A smaller value needs less KV cache. Between 1 and 16777216."
        ),
    )
    max_num_seqs: int = Field(
        default=_default("max_num_seqs"),
        ge=1,
        le=1024,
        description=(
            "Most requests a group works on at once; more wait in its queue. They are spread over as many cohorts as "
            "there are stages, the same number to each, which is rounded down; fewer than `parallelism.pipeline` count "
            "as that many. Default 16, between 1 and 1024."
        ),
    )
    max_num_batched_tokens: int = Field(
        default=_default("max_num_batched_tokens"),
        ge=1,
        le=65_536,
        description=(
            "Most tokens one step may carry; a longer prompt is read in chunks over several steps. A larger value "
            "reads long prompts faster and makes running answers wait longer. Default 512, between 1 and 65536, and at "
            "least `maxNumSeqs`: with less, some requests would never get a token into a step."
        ),
    )
    prefix_cache: bool = Field(
        default=True,
        description=(
            "Whether a request begins with keys and values that an earlier one left in the cache, where their first "
            "tokens are the same (a shared system prompt, the turns of a chat). It answers sooner and says the same. "
            "Requests of all clients share the cache: who can time answers can tell whether a beginning was asked for "
            "before. Default true."
        ),
    )
    graphs: Literal["auto", "off", "piecewise", "full"] = Field(
        default="auto",
        description=(
            "How much of a step runs as a captured graph, which on CPU means compiled by torch.compile: `full` whole "
            "layers when every row is a decode and as `piecewise` otherwise, `piecewise` all but attention, `off` "
            "nothing. Compiling takes tens of seconds at a first start and needs a C++ compiler in the image. Default "
            "`auto`, which on CPU is `off`: its own kernel is as fast there and starts at once."
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description=(
            "What the stages compute on. Default `auto`: a CUDA device in a container that has one (ask for it by "
            "`resources`, `nvidia.com/gpu: 1`), otherwise the CPU. With `cuda` a stage without a device ends with "
            "BadConfig. The CUDA path is unproven until a GPU has run `make gpu-check` (docs/gpu.md)."
        ),
    )
    seed: int = Field(
        default=_default("seed"),
        ge=0,
        le=2_147_483_647,
        description=(
            "Base seed of the group's own random choices; a request's `seed` decides its sampling noise. "
            "Default 0, between 0 and 2147483647."
        ),
    )


class ParallelismSpec(SpecBase):
    """How one group divides the model."""

    pipeline: int = Field(
        default=1,
        ge=1,
        le=MOST_STAGES,
        description=(
            "Number of stages that the model's layers are cut into; each stage is one pod. Default 1, between 1 and "
            "64, and at most the model's number of layers. With `stages` given, its length must equal this."
        ),
    )
    tensor: Annotated[int, AfterValidator(_tensor)] = Field(
        default=1,
        json_schema_extra=cel_extra(cel("self == 1", _NO_TENSOR)),
        description="Number of devices that share one stage's layers. Default and only value so far: 1.",
    )
