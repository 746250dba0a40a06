"""The PipelineModel: one model, its cut into stages, and the number of groups.

Only implemented features are accepted. `PipelineModel.model_validate(mapping)` parses a manifest, as
`manifest_loader.load_manifests` does for files. Rules between fields are checked after every field is well formed.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from stageline_api.resource import layer_ranges
from stageline_api.resource.base import SpecBase, cel, cel_extra, check_pattern
from stageline_api.resource.field_problem import FieldProblem, show_value
from stageline_api.resource.life.autoscaling import MOST_REPLICAS, AutoscalingSpec
from stageline_api.resource.life.policy import RestartSpec, RolloutSpec, TimeoutsSpec
from stageline_api.resource.life.recorded_status import read_status
from stageline_api.resource.life.status import PipelineModelStatus
from stageline_api.resource.placing.gang import GANG_RULES, gang_problems
from stageline_api.resource.placing.placement import NetworkSpec, PlacementSpec
from stageline_api.resource.placing.tls import TLS_RULES, tls_problems
from stageline_api.resource.pods.pod import StageSpec
from stageline_api.resource.pods.template import TemplateSpec
from stageline_api.resource.serving.engine import (
    ENGINE_RULES,
    MOST_STAGES,
    EngineSpec,
    ParallelismSpec,
    engine_problems,
)
from stageline_api.resource.serving.model import ModelSpec
from stageline_api.resource.serving.speculative import ON_DEVICES_OF_RANKS
from stageline_api.resource.stage_pods import STAGE_POD_RULES, stage_pod_problems
from stageline_api.runtime_config import LayerRange

LONGEST_NAME: Final = 40
NAME_PATTERN: Final = r"^[a-z]([a-z0-9-]*[a-z0-9])?$"
NAME_RULE: Final = 'must be lower-case letters, digits and "-", starting with a letter and not ending with "-"'
LENGTH_RULE: Final = (
    f"must be at most {LONGEST_NAME} characters, because pod names add group, incarnation and stage to it and "
    "Kubernetes ends at 63"
)


def _name(name: str) -> str:
    if len(name) > LONGEST_NAME:
        raise ValueError(LENGTH_RULE)
    return check_pattern(name, NAME_PATTERN, NAME_RULE)


def _namespace(name: str) -> str:
    rule = 'must be the name of a namespace: at most 63 lower-case letters, digits and "-"'
    return check_pattern(name, r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", rule)


class Metadata(BaseModel):
    """Name and bookkeeping. Fields that only the API server writes are accepted and ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel)

    name: Annotated[str, AfterValidator(_name)]
    namespace: Annotated[str, AfterValidator(_namespace)] = "default"
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    uid: str | None = None
    generation: int | None = None
    resource_version: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    generate_name: str | None = None
    finalizers: list[str] = []
    owner_references: list[dict[str, Any]] = []
    managed_fields: list[dict[str, Any]] = []
    self_link: str | None = None


GROUP: Final = "stageline.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = "stageline.dev/v1alpha1"
KIND: Final = "PipelineModel"
PLURAL: Final = "pipelinemodels"
SHORT_NAME: Final = "plm"

_GRACE_AFTER_DRAIN_SECONDS: Final = 15

_STAGES_RULES: Final = (
    cel(
        "!has(self.stages) || size(self.stages) == 0 || size(self.stages) == self.parallelism.pipeline",
        "must have one entry for each stage of parallelism.pipeline",
        ".stages",
    ),
    cel(
        "!has(self.stages) || self.stages.all(s, has(s.layers)) || self.stages.all(s, !has(s.layers))",
        "when one stage gives layers, every stage must",
        ".stages",
    ),
    # Each stage starts where the one before ended: [0, ends...] and [starts..., last end] are then the same list.
    cel(
        "!has(self.stages) || size(self.stages) == 0 || !self.stages.all(s, has(s.layers)) || "
        "[0] + self.stages.map(s, int(s.layers.split('-')[1]) + 1) == self.stages.map(s, int(s.layers.split('-')[0])) "
        "+ [int(self.stages[size(self.stages) - 1].layers.split('-')[1]) + 1]",
        "layers must start at 0 and follow on from stage to stage, without an overlap or a missing layer",
        ".stages",
    ),
    cel(
        "!has(self.stages) || self.stages.all(s, !has(s.layers) || "
        "int(s.layers.split('-')[0]) <= int(s.layers.split('-')[1]))",
        "the first layer of a range must not be above its last",
        ".stages",
    ),
    cel(
        "!has(self.engine.maxNumBatchedTokens) || !has(self.engine.maxNumSeqs) || "
        "self.engine.maxNumBatchedTokens >= self.engine.maxNumSeqs",
        "must be at least engine.maxNumSeqs",
        ".engine.maxNumBatchedTokens",
    ),
    cel(
        "!has(self.engine.speculative) || self.engine.speculative.method != 'draft' || self.engine.device != 'cuda' || "
        "(self.parallelism.tensor == 1 && self.parallelism.expert == 1)",
        ON_DEVICES_OF_RANKS,
        ".engine.speculative",
    ),
    cel(
        "!has(self.template.terminationGracePeriodSeconds) || "
        "self.template.terminationGracePeriodSeconds >= self.timeouts.drainSeconds",
        "must be at least timeouts.drainSeconds",
        ".template.terminationGracePeriodSeconds",
    ),
)


class PipelineModelSpec(SpecBase):
    """What a person wants."""

    model: ModelSpec = Field(description="The model: its source, its name and its cache. Required.")
    engine: EngineSpec = Field(
        default=EngineSpec(), description=("How the model runs: engine, number format, lengths, batch size.")
    )
    parallelism: ParallelismSpec = Field(
        default=ParallelismSpec(), description="How one group divides the model. By default one stage holds all of it."
    )
    stages: Annotated[tuple[StageSpec, ...], Field(strict=False)] = Field(
        default=(),
        max_length=MOST_STAGES,
        description=(
            "Differences between stages, in pipeline order. By default all stages are alike and the engine cuts the "
            "layers. If set, its length must equal `parallelism.pipeline`."
        ),
    )
    template: TemplateSpec = Field(default=TemplateSpec(), description="Settings that all stage pods share.")
    placement: PlacementSpec = Field(default=PlacementSpec(), description="Which nodes the stages of one group use.")
    network: NetworkSpec = Field(default=NetworkSpec(), description="The network between stages.")
    replicas: int = Field(
        default=1,
        ge=0,
        le=MOST_REPLICAS,
        description=(
            "Number of groups. A group is a whole copy of the pipeline, with `parallelism.pipeline` pods; requests "
            "are spread over groups. With 0 there is none, and the gateway holds requests until one is ready "
            "(`--start-hold-seconds`). Default 1, between 0 and 64. Also set by `kubectl scale`, and by the operator "
            "with `autoscaling`."
        ),
    )
    autoscaling: AutoscalingSpec | None = Field(
        default=None,
        description=(
            "The operator sets `replicas` from the engines' queues. Leave it out if another autoscaler sets "
            "`replicas`. Default: no autoscaling."
        ),
    )
    suspend: bool = Field(
        default=False,
        description=(
            "Drains and removes all groups and keeps all other objects, until it is false again. Downloaded weights "
            "stay if the cache outlives its pods. Default false."
        ),
    )
    rollout: RolloutSpec = Field(
        default=RolloutSpec(), description="How a change of the template is rolled out, by whole groups."
    )
    restart: RestartSpec = Field(default=RestartSpec(), description="Restart budget and back-off of a failed group.")
    timeouts: TimeoutsSpec = Field(
        default=TimeoutsSpec(), description="How long each phase may take before it counts as failed."
    )

    model_config = ConfigDict(
        json_schema_extra=cel_extra(*STAGE_POD_RULES, *_STAGES_RULES, *ENGINE_RULES, *GANG_RULES, *TLS_RULES)
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> "PipelineModelSpec":
        problems = spec_problems(self)
        if problems:
            summary = "; ".join(str(problem) for problem in problems)
            raise PydanticCustomError("fields_disagree", "{summary}", {"problems": problems, "summary": summary})
        return self

    @property
    def stage_layers(self) -> tuple[LayerRange, ...] | None:
        """The explicit cut, one range for each stage, or None if the engine cuts."""
        ranges = tuple(each for stage in self.stages if (each := stage.layer_range) is not None)
        return ranges or None


def _recorded(status: object) -> object:
    """A file may contain another version's status (`kubectl get -o yaml`), which must not invalidate its spec."""
    return read_status(status) if isinstance(status, dict) else status


class PipelineModel(SpecBase):
    """The custom resource."""

    api_version: Literal["stageline.dev/v1alpha1"]
    kind: Literal["PipelineModel"]
    metadata: Metadata
    spec: PipelineModelSpec
    status: Annotated[PipelineModelStatus | None, Field(strict=False), BeforeValidator(_recorded)] = None

    model_config = ConfigDict(
        json_schema_extra=cel_extra(
            cel(
                f"size(self.metadata.name) <= {LONGEST_NAME}",
                f"metadata.name {LENGTH_RULE}",
            ),
            cel(
                f"self.metadata.name.matches('{NAME_PATTERN}')",
                f"metadata.name {NAME_RULE}",
            ),
        )
    )

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def served_name(self) -> str:
        """The name that clients send as `model`."""
        return self.spec.model.served_name or self.metadata.name

    @property
    def termination_grace_period_seconds(self) -> int:
        """How long a stage pod may take to end: the template's value, or the drain time plus a margin."""
        given = self.spec.template.termination_grace_period_seconds
        return self.spec.timeouts.drain_seconds + _GRACE_AFTER_DRAIN_SECONDS if given is None else given

    def to_manifest(self) -> dict[str, Any]:
        """The resource as JSON values under Kubernetes' names, with defaults and without unset fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def spec_problems(spec: PipelineModelSpec) -> list[FieldProblem]:
    """Problems between the fields of a spec with well-formed fields."""
    problems: list[FieldProblem] = []
    stage_count = spec.parallelism.pipeline
    if spec.stages and len(spec.stages) != stage_count:
        rule = (
            f"has {len(spec.stages)} entries but parallelism.pipeline is {stage_count}: give one entry for each stage"
        )
        problems.append(FieldProblem(path="spec.stages", rule=rule))
    for index, rule in layer_ranges.range_problems([stage.layer_range for stage in spec.stages]):
        problems.append(_layers_problem(spec, index, rule))
    most, requests = spec.engine.max_num_batched_tokens, spec.engine.max_num_seqs
    if most is not None and requests is not None and most < requests:
        rule = f"must be at least engine.maxNumSeqs, which is {requests}: each request takes a token of a step"
        problems.append(FieldProblem(path="spec.engine.maxNumBatchedTokens", value=str(most), rule=rule))
    problems += engine_problems(spec.engine, spec.parallelism, spec.model.served_name)
    problems += stage_pod_problems(spec.engine, spec.parallelism, spec.template, spec.network, spec.stages)
    problems += gang_problems(spec.placement.gang, spec.template)
    problems += tls_problems(spec.network, spec.engine, spec.parallelism)
    speculative = spec.engine.speculative
    drafts_on_devices = speculative is not None and speculative.method == "draft" and spec.engine.device == "cuda"
    if drafts_on_devices and spec.parallelism.devices_per_stage != 1:
        problems.append(FieldProblem(path="spec.engine.speculative", rule=ON_DEVICES_OF_RANKS))
    grace = spec.template.termination_grace_period_seconds
    if grace is not None and grace < spec.timeouts.drain_seconds:
        rule = f"must be at least timeouts.drainSeconds, which is {spec.timeouts.drain_seconds}"
        path = "spec.template.terminationGracePeriodSeconds"
        problems.append(FieldProblem(path=path, value=str(grace), rule=rule))
    return problems


def model_problems(spec: PipelineModelSpec, num_layers: int, context_length: int) -> list[FieldProblem]:
    """Problems of a spec with a model of `num_layers` layers and at most `context_length` tokens."""
    problems = check_cut(spec, num_layers)
    asked = spec.engine.max_model_len
    # vLLM has its own rules on how far a model may exceed its config.
    if asked is not None and asked > context_length and spec.engine.name != "vllm":
        rule = f"must be at most {context_length}, the model's context length"
        problems.append(FieldProblem(path="spec.engine.maxModelLen", value=str(asked), rule=rule))
    return problems


def check_cut(spec: PipelineModelSpec, num_layers: int) -> list[FieldProblem]:
    """Problems of the cut for a model of `num_layers` layers; empty if it fits."""
    problems: list[FieldProblem] = []
    stage_count = spec.parallelism.pipeline
    if stage_count > num_layers:
        rule = f"must be at most {num_layers}, the model's number of layers"
        problems.append(FieldProblem(path="spec.parallelism.pipeline", value=str(stage_count), rule=rule))
    if spec.stage_layers is not None:
        end_rule = layer_ranges.end_problem(spec.stage_layers[-1].last, num_layers)
        if end_rule is not None:
            problems.append(_layers_problem(spec, len(spec.stages) - 1, end_rule))
    return problems


def _layers_problem(spec: PipelineModelSpec, index: int, rule: str) -> FieldProblem:
    layers = spec.stages[index].layers
    value = None if layers is None else show_value(layers)
    return FieldProblem(path=f"spec.stages[{index}].layers", value=value, rule=rule)
