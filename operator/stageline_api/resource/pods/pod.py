"""The parts of a stage pod that a user may set, and `spec.stages[]`: what differs for one stage."""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from stageline_api import env as contract
from stageline_api.resource.base import Quantity, ShortText, SpecBase, cel, cel_exactly_one, cel_extra, check_pattern
from stageline_api.resource.layer_ranges import LAYERS_PATTERN, parse_layer_range
from stageline_api.resource.pods.scheduling import ClassName
from stageline_api.runtime_config import LayerRange

ENV_NAME_PATTERN: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
RESERVED_ENV: Final = frozenset(
    {
        contract.MASTER_ADDR,
        contract.MASTER_PORT,
        contract.RANK,
        contract.WORLD_SIZE,
        contract.LWS_LEADER_ADDRESS,
        contract.LWS_GROUP_SIZE,
        contract.LWS_WORKER_INDEX,
        contract.HF_TOKEN,
    }
)
"""Variables of the pod contract; all names that start with STAGELINE_ are reserved too."""

RESERVED_RULE: Final = "is set by Stageline itself"
_RESERVED_LIST: Final = ", ".join(f"'{name}'" for name in sorted(RESERVED_ENV))


def _layers(text: str) -> str:
    parse_layer_range(text)
    return text


def is_reserved_variable(name: str) -> bool:
    """Whether Stageline itself sets it."""
    return name in RESERVED_ENV or name.startswith("STAGELINE_")


def _env_name(name: str) -> str:
    rule = "must be a name for an environment variable: letters, digits and _, not starting with a digit"
    check_pattern(name, ENV_NAME_PATTERN, rule)
    if is_reserved_variable(name):
        raise ValueError(RESERVED_RULE)
    return name


def unique_env(variables: "tuple[EnvVar, ...]") -> "tuple[EnvVar, ...]":
    """Return the variables, or raise ValueError with the duplicate names."""
    names = [variable.name for variable in variables]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} given more than once")
    return variables


class ResourcesSpec(SpecBase):
    """Requests and limits of a stage's main container, in Kubernetes' notation."""

    requests: dict[ShortText, Quantity] = Field(
        default={},
        max_length=16,
        description="Requests by resource name, as in `cpu: 4, memory: 8Gi`. Default: none.",
    )
    limits: dict[ShortText, Quantity] = Field(
        default={},
        max_length=16,
        description=(
            "Limits by resource name, including devices such as `nvidia.com/gpu`. A memory limit below weights plus "
            "KV cache ends in an out-of-memory kill. Default: none."
        ),
    )


class TolerationSpec(SpecBase):
    """A node taint that stage pods tolerate, as in Kubernetes' own tolerations."""

    key: ShortText | None = Field(default=None, description="Key of the taint. Default: any key, with `Exists`.")
    operator: Literal["Equal", "Exists"] = Field(
        default="Equal",
        description="`Equal` (default) also compares `value`; `Exists` does not.",
    )
    value: ShortText | None = Field(default=None, description="Value of the taint, for `Equal`. Default: empty.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint. Default: any effect."
    )
    toleration_seconds: int | None = Field(
        default=None,
        ge=0,
        le=2_147_483_647,
        description="Seconds that a pod stays after a `NoExecute` taint appears. Default: unlimited.",
    )


class KeySelector(SpecBase):
    """A key of a Secret or a ConfigMap."""

    name: ClassName = Field(description="Name of the object, in the model's namespace. Required.")
    key: ShortText = Field(description="Key in the object. Required.")
    optional: bool = Field(default=False, description="Whether pods start without it if it is missing. Default false.")


class FieldSelector(SpecBase):
    """A field of the pod itself."""

    field_path: ShortText = Field(
        description="Such as `spec.nodeName` or `metadata.labels['example.com/team']`. Required."
    )


class ResourceFieldSelector(SpecBase):
    """A resource request or limit of a container of the pod."""

    resource: ShortText = Field(description="Such as `limits.memory`. Required.")
    container_name: ShortText | None = Field(
        default=None, description=("Container to read. Default: the container of the variable.")
    )
    divisor: Quantity | None = Field(default=None, description='Unit of the value, such as "1Mi". Default: 1.')


_ONE_VALUE_RULE: Final = "give exactly one of secretKeyRef, configMapKeyRef, fieldRef and resourceFieldRef"
_VALUES: Final = ("secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef")
_VALUE_OR_SOURCE_RULE: Final = "give value or valueFrom, not both"


class EnvSource(SpecBase):
    """Source of a variable's value, as in a pod's own `valueFrom`."""

    secret_key_ref: KeySelector | None = Field(default=None, description="A key of a Secret.")
    config_map_key_ref: KeySelector | None = Field(default=None, description="A key of a ConfigMap.")
    field_ref: FieldSelector | None = Field(default=None, description="A field of the pod.")
    resource_field_ref: ResourceFieldSelector | None = Field(
        default=None, description="A container's amount of `cpu`, `memory` or `ephemeral-storage`."
    )

    @model_validator(mode="after")
    def _one_source(self) -> "EnvSource":
        given = (self.secret_key_ref, self.config_map_key_ref, self.field_ref, self.resource_field_ref)
        if sum(each is not None for each in given) != 1:
            raise PydanticCustomError("at_field", "{rule}", {"at": (), "rule": _ONE_VALUE_RULE})
        return self

    model_config = ConfigDict(json_schema_extra=cel_extra(cel_exactly_one(_VALUES, _ONE_VALUE_RULE)))


class EnvVar(SpecBase):
    """One environment variable."""

    name: Annotated[str, AfterValidator(_env_name)] = Field(
        min_length=1,
        max_length=253,
        json_schema_extra=cel_extra(
            cel(f"!self.startsWith('STAGELINE_') && !(self in [{_RESERVED_LIST}])", RESERVED_RULE),
            pattern=ENV_NAME_PATTERN,
        ),
        description="Name of the variable. Names that Stageline sets (STAGELINE_*, MASTER_ADDR, RANK …) are refused.",
    )
    value: str = Field(
        default="", max_length=32_768, description="Literal value. Default: empty. Don't put secrets here."
    )
    value_from: EnvSource | None = Field(
        default=None,
        description="Source of the value in place of `value`: a Secret, a ConfigMap or the pod.",
    )

    @model_validator(mode="after")
    def _value_or_source(self) -> "EnvVar":
        if self.value and self.value_from is not None:
            raise PydanticCustomError("at_field", "{rule}", {"at": ("valueFrom",), "rule": _VALUE_OR_SOURCE_RULE})
        return self

    model_config = ConfigDict(
        json_schema_extra=cel_extra(
            cel("!has(self.valueFrom) || self.value == ''", _VALUE_OR_SOURCE_RULE, ".valueFrom")
        )
    )


class ImagePullSecret(SpecBase):
    """A Secret by name, as in a pod's own `imagePullSecrets`."""

    name: ClassName = Field(
        description=(
            "Name of a Secret of type `kubernetes.io/dockerconfigjson` in the model's namespace. Required, unique."
        )
    )


def unique_pull_secrets(secrets: tuple[ImagePullSecret, ...]) -> tuple[ImagePullSecret, ...]:
    """Return the Secrets, or raise ValueError with the duplicate names."""
    names = [secret.name for secret in secrets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} given more than once")
    return secrets


class StageSpec(SpecBase):
    """What differs for one stage."""

    layers: Annotated[str | None, AfterValidator(_layers)] = Field(
        default=None,
        max_length=9,
        json_schema_extra={"pattern": LAYERS_PATTERN},
        description=(
            "Layers of this stage, as `first-last` from 0, both included. Default: the engine cuts. Set it for every "
            "stage or for none; together they must be every layer once, in order."
        ),
    )
    resources: ResourcesSpec | None = Field(
        default=None, description="Resources of this stage, replacing `template.resources`."
    )
    node_selector: dict[ShortText, ShortText] = Field(
        default={},
        max_length=32,
        description="Node labels for this stage, merged over `template.nodeSelector`.",
    )
    tolerations: Annotated[tuple[TolerationSpec, ...], Field(strict=False)] = Field(
        default=(), max_length=32, description="Tolerations of this stage, added to `template.tolerations`."
    )

    @property
    def layer_range(self) -> LayerRange | None:
        """The layers as numbers, or None if the engine cuts."""
        return None if self.layers is None else parse_layer_range(self.layers)


EnvVars = Annotated[
    tuple[EnvVar, ...],
    Field(
        strict=False,
        max_length=64,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    ),
    AfterValidator(unique_env),
]
"""Environment variables with unique names."""
