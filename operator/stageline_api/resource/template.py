"""`spec.template`: what all stage pods have in common."""

from typing import Annotated

from pydantic import AfterValidator, Field

from stageline_api.resource.base import ShortText, SpecBase, check_pattern
from stageline_api.resource.pod import EnvVars, ResourcesSpec, TolerationSpec
from stageline_api.resource.scheduling import AffinitySpec, Annotations, ClassName, Labels
from stageline_api.resource.volume import SecurityContextSpec, VolumeSpec, unique_volumes


def _image(image: str) -> str:
    return check_pattern(image, r"^\S+$", "must be the name of a container image, without spaces")


class TemplateSpec(SpecBase):
    """What all stage pods have in common."""

    image: Annotated[str | None, AfterValidator(_image)] = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Container image of the stages. Default: the image that the operator was installed with.",
    )
    resources: ResourcesSpec = Field(
        default=ResourcesSpec(),
        description="Requests and limits of each stage, unless `stages[].resources` says other.",
    )
    env: EnvVars = Field(
        default=(),
        description="Environment variables for every container of the stages, by name and value. Default: none.",
    )
    node_selector: dict[ShortText, ShortText] = Field(
        default={}, max_length=32, description="Labels a node must have to run a stage. Default: any node."
    )
    affinity: AffinitySpec = Field(
        default=AffinitySpec(), description="Kubernetes' own affinity rules, besides those of `placement`."
    )
    tolerations: Annotated[tuple[TolerationSpec, ...], Field(strict=False)] = Field(
        default=(), max_length=32, description="Taints of nodes that stages put up with. Default: none."
    )
    volumes: Annotated[tuple[VolumeSpec, ...], Field(strict=False), AfterValidator(unique_volumes)] = Field(
        default=(),
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        description="Volumes mounted into every container of the stages. Default: none.",
    )
    security_context: SecurityContextSpec = Field(
        default=SecurityContextSpec(), description="Who the stages run as. By default a user who is not root."
    )
    priority_class_name: ClassName | None = Field(
        default=None, description="Priority class of the pods. Default: the cluster's default."
    )
    scheduler_name: ClassName | None = Field(
        default=None, description="Scheduler that places the pods, such as `volcano`. Default: the cluster's own."
    )
    runtime_class_name: ClassName | None = Field(
        default=None, description="Runtime class of the pods, such as `nvidia`. Default: the node's default."
    )
    labels: Labels = Field(
        default={},
        description=(
            "Labels for every stage pod, for schedulers such as Kueue. In a value `$(MODEL)`, `$(GROUP)`, "
            "`$(INCARNATION)`, `$(STAGE)` and `$(STAGES)` stand for the pod's own. Default: none."
        ),
    )
    annotations: Annotations = Field(
        default={},
        description=(
            "Annotations for every stage pod, with the same placeholders as labels: "
            "`scheduling.k8s.io/group-name: $(MODEL)-$(GROUP)-$(INCARNATION)`. Default: none."
        ),
    )
    termination_grace_period_seconds: int | None = Field(
        default=None,
        ge=1,
        le=86_400,
        description=(
            "How long a pod may take to end before it is killed, in seconds. Default: `timeouts.drainSeconds` plus 15; "
            "less than `timeouts.drainSeconds` is refused, as it would cut answers off. Between 1 and 86400."
        ),
    )
