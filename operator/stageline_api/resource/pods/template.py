"""`spec.template`: settings that all stage pods share."""

from typing import Annotated, Final

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from stageline_api.resource.base import (
    Quantity,
    ShortText,
    SpecBase,
    cel,
    cel_exactly_one,
    cel_extra,
    check_absolute_path,
    check_pattern,
)
from stageline_api.resource.pods.pod import EnvVars, ImagePullSecret, ResourcesSpec, TolerationSpec, unique_pull_secrets
from stageline_api.resource.pods.scheduling import AffinitySpec, Annotations, ClassName, Labels, RawObject

VOLUME_NAME_PATTERN: Final = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
RESERVED_VOLUMES: Final = frozenset(
    {"config", "cache", "tmp", "shm", "source", "stageline", "stageline-draft", "stageline-tls"}
)
RESERVED_PATHS: Final = (
    "/etc/stageline",
    "/var/cache/stageline",
    "/var/cache/stageline-compiled",
    "/var/lib/stageline",
    "/opt/stageline-vllm",
    "/dev/shm",
    "/tmp",
)
RESERVED_NAME_RULE: Final = "is the name of a volume that Stageline itself makes"
_RESERVED_PATH_RULE: Final = f"must not be within {', '.join(RESERVED_PATHS)}, which Stageline itself mounts"
_ONE_SOURCE_RULE: Final = "give exactly one of claimName, hostPath, configMapName, secretName and emptyDirSizeLimit"
_SOURCES: Final = ("claimName", "hostPath", "configMapName", "secretName", "emptyDirSizeLimit")
_ROOT_RULE: Final = "0 is root: set runAsNonRoot to false as well"


def _volume_name(name: str) -> str:
    check_pattern(name, VOLUME_NAME_PATTERN, 'must be at most 63 lower-case letters, digits and "-"')
    if name in RESERVED_VOLUMES:
        raise ValueError(RESERVED_NAME_RULE)
    return name


def check_mount_path(path: str) -> str:
    """Return `path`, or raise ValueError: it must be absolute and not within a mount of Stageline's."""
    check_absolute_path(path)
    if any(path == each or path.startswith(f"{each}/") for each in RESERVED_PATHS) or path == "/":
        raise ValueError(_RESERVED_PATH_RULE)
    return path


def _path_cel() -> str:
    taken = " && ".join(f"self != '{path}' && !self.startsWith('{path}/')" for path in RESERVED_PATHS)
    return f"self != '/' && {taken}"


class VolumeSpec(SpecBase):
    """One volume, mounted into every container of the stages."""

    name: Annotated[str, AfterValidator(_volume_name)] = Field(
        min_length=1,
        max_length=63,
        json_schema_extra=cel_extra(
            cel(f"!(self in [{', '.join(repr(each) for each in sorted(RESERVED_VOLUMES))}])", RESERVED_NAME_RULE),
            pattern=VOLUME_NAME_PATTERN,
        ),
        description="Name of the volume. Required, unique.",
    )
    mount_path: Annotated[str, AfterValidator(check_mount_path)] = Field(
        max_length=1024,
        json_schema_extra=cel_extra(cel(_path_cel(), _RESERVED_PATH_RULE), pattern="^/"),
        description="Absolute path in the containers. Required.",
    )
    read_only: bool = Field(default=True, description="Whether the mount is read-only. Default true.")
    claim_name: ClassName | None = Field(default=None, description="PersistentVolumeClaim to mount.")
    host_path: Annotated[str | None, AfterValidator(check_absolute_path)] = Field(
        default=None,
        max_length=1024,
        json_schema_extra={"pattern": "^/"},
        description="Directory of the node. The restricted Pod Security profile forbids it.",
    )
    config_map_name: ClassName | None = Field(default=None, description="ConfigMap to mount.")
    secret_name: ClassName | None = Field(default=None, description="Secret to mount.")
    empty_dir_size_limit: Quantity | None = Field(
        default=None, description='Size limit of an emptyDir, such as "10Gi".'
    )

    @model_validator(mode="after")
    def _one_source(self) -> "VolumeSpec":
        given = (self.claim_name, self.host_path, self.config_map_name, self.secret_name, self.empty_dir_size_limit)
        if sum(each is not None for each in given) != 1:
            raise PydanticCustomError("at_field", "{rule}", {"at": (), "rule": _ONE_SOURCE_RULE})
        return self

    model_config = ConfigDict(json_schema_extra=cel_extra(cel_exactly_one(_SOURCES, _ONE_SOURCE_RULE)))


def unique_volumes(volumes: tuple[VolumeSpec, ...]) -> tuple[VolumeSpec, ...]:
    """Return the volumes, or raise ValueError with the duplicates."""
    for what, values in (("name", [v.name for v in volumes]), ("mountPath", [v.mount_path for v in volumes])):
        twice = sorted({each for each in values if values.count(each) > 1})
        if twice:
            raise ValueError(f"{what} {', '.join(twice)} given more than once")
    return volumes


class SecurityContextSpec(SpecBase):
    """User and groups of the stages. The rest stays restricted: read-only root, no capabilities, no escalation."""

    run_as_non_root: bool = Field(default=True, description="Whether root is refused. Default true.")
    run_as_user: int = Field(
        default=10001, ge=0, le=2_147_483_647, description="User ID. Default 10001, the user of the images."
    )
    run_as_group: int = Field(default=10001, ge=0, le=2_147_483_647, description="Group ID. Default 10001.")
    fs_group: int = Field(default=10001, ge=0, le=2_147_483_647, description="Group that owns volumes. Default 10001.")
    supplemental_groups: Annotated[tuple[Annotated[int, Field(ge=1, le=2_147_483_647)], ...], Field(strict=False)] = (
        Field(
            default=(),
            max_length=16,
            description="Further groups of the processes, such as a device's. Default: none.",
        )
    )

    @model_validator(mode="after")
    def _root_is_meant(self) -> "SecurityContextSpec":
        if self.run_as_user == 0 and self.run_as_non_root:
            raise PydanticCustomError("at_field", "{rule}", {"at": ("runAsUser",), "rule": _ROOT_RULE})
        return self

    model_config = ConfigDict(
        json_schema_extra=cel_extra(cel("self.runAsUser != 0 || !self.runAsNonRoot", _ROOT_RULE, ".runAsUser"))
    )


def _image(image: str) -> str:
    return check_pattern(image, r"^\S+$", "must be the name of a container image, without spaces")


class TemplateSpec(SpecBase):
    """Settings that all stage pods share."""

    image: Annotated[str | None, AfterValidator(_image)] = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Image of the stages. Default: the operator's default runtime image.",
    )
    image_pull_secrets: Annotated[
        tuple[ImagePullSecret, ...], Field(strict=False), AfterValidator(unique_pull_secrets)
    ] = Field(
        default=(),
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        description="Secrets for pulling the images of stage pods. Default: none.",
    )
    resources: ResourcesSpec = Field(
        default=ResourcesSpec(),
        description="Requests and limits of each stage, unless `stages[].resources` is set.",
    )
    engine_resources: ResourcesSpec | None = Field(
        default=None,
        description=(
            "Requests and limits of the `engine` container beside stage 0. Default: none. For each of `cpu`, `memory` "
            "and `ephemeral-storage` that the stage sets (a quota then requires it of every container): limits of "
            "`2`, `2Gi`, `1Gi` and requests of `250m`, `512Mi`, `256Mi`."
        ),
    )
    prepare_resources: ResourcesSpec | None = Field(
        default=None,
        description=(
            "Requests and limits of the `prepare` init container. Default: the stage's `cpu`, `memory` and "
            "`ephemeral-storage`; this costs nothing extra, as it runs before the stage."
        ),
    )
    shared_memory_size: Quantity = Field(
        default="1Gi",
        description=(
            'Size limit of /dev/shm, which NCCL uses within a node. Counts as memory of the pod. Default "1Gi".'
        ),
    )
    env: EnvVars = Field(
        default=(),
        description=(
            "Environment variables of every container of the stages. With engine `vllm`, variables that the operator "
            "sets (`VLLM_HOST_IP`, `VLLM_API_KEY` …) are refused. Default: none."
        ),
    )
    service_account_name: ClassName | None = Field(
        default=None,
        description=(
            "ServiceAccount of the pods, for grants of a cloud or a registry. Its token is not mounted. Default: "
            "`default`."
        ),
    )
    pod_template: RawObject = Field(
        default={},
        description=(
            "Patch of the pod template for all other fields of Kubernetes' pod API: `metadata` labels and "
            "annotations, and `spec`, such as `hostNetwork`, `topologySpreadConstraints`, `resourceClaims`, "
            "`dnsConfig`, init containers, volumes, and Stageline's containers by name (`stage`, `engine`, `prepare`, "
            "`vllm-files`). Placeholders work as in labels. Fields that the operator manages or that exist in this "
            "spec are refused. Default: none."
        ),
    )
    node_selector: dict[ShortText, ShortText] = Field(
        default={}, max_length=32, description="Labels that a node must have. Default: any node."
    )
    affinity: AffinitySpec = Field(
        default=AffinitySpec(), description="Kubernetes affinity rules, in addition to `placement`."
    )
    tolerations: Annotated[tuple[TolerationSpec, ...], Field(strict=False)] = Field(
        default=(), max_length=32, description="Tolerations of the pods. Default: none."
    )
    volumes: Annotated[tuple[VolumeSpec, ...], Field(strict=False), AfterValidator(unique_volumes)] = Field(
        default=(),
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        description="Volumes mounted into every container of the stages. Default: none.",
    )
    security_context: SecurityContextSpec = Field(
        default=SecurityContextSpec(),
        description=("User and groups of the stages. By default a user that is not root."),
    )
    priority_class_name: ClassName | None = Field(
        default=None, description="Priority class of the pods. Default: the cluster's default."
    )
    scheduler_name: ClassName | None = Field(
        default=None, description="Scheduler of the pods, such as `volcano`. Default: the cluster's own."
    )
    runtime_class_name: ClassName | None = Field(
        default=None,
        description=(
            "Runtime class of the pods, such as `nvidia`. Default: the chart's `gpu.runtimeClassName` for stages with "
            "`engine.device: cuda` or an NVIDIA resource in `resources` (unless `engine.device` is `cpu`), otherwise "
            "the node's default."
        ),
    )
    labels: Labels = Field(
        default={},
        description=(
            "Labels of every stage pod. In values, `$(MODEL)`, `$(GROUP)`, `$(INCARNATION)`, `$(STAGE)` and "
            "`$(STAGES)` are replaced by the pod's own. Default: none."
        ),
    )
    annotations: Annotations = Field(
        default={},
        description="Annotations of every stage pod, with the same placeholders as labels. Default: none.",
    )
    termination_grace_period_seconds: int | None = Field(
        default=None,
        ge=1,
        le=86_400,
        description=(
            "Seconds that a pod may take to end before it is killed. At least `timeouts.drainSeconds`, or answers "
            "would be cut off. Default: `timeouts.drainSeconds` plus 15. Between 1 and 86400."
        ),
    )
