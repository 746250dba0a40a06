"""`spec.placement` and `spec.network`: which nodes the stages of a group share, and how they talk."""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from stageline_api.resource.base import SpecBase, check_pattern
from stageline_api.resource.placing.gang import GangSpec
from stageline_api.resource.placing.tls import TlsSpec
from stageline_api.resource.placing.transport import StageTransport
from stageline_api.resource.pods.pod import EnvVars

INTERFACE_PATTERN: Final = r"^[A-Za-z0-9_.-]{1,15}$"
TOPOLOGY_KEY_PATTERN: Final = r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
HOSTNAME_KEY: Final = "kubernetes.io/hostname"


def _interface(name: str) -> str:
    return check_pattern(name, INTERFACE_PATTERN, "must be the name of a network interface, at most 15 characters")


def _topology_key(key: str) -> str:
    return check_pattern(key, TOPOLOGY_KEY_PATTERN, "must be the key of a node label, such as kubernetes.io/hostname")


def _resource(name: str) -> str:
    rule = "must be the name of an extended resource, such as rdma/hca"
    return check_pattern(name, r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", rule)


class PlacementSpec(SpecBase):
    """Which nodes the stages of one group share."""

    spread: Literal["Required", "Preferred", "None"] = Field(
        default="Preferred",
        description=(
            "Whether no two stages of a group share a `topologyKey`: `Required` leaves a stage pending rather than "
            "let it share, `Preferred` (default) shares where it must, `None` leaves it to the scheduler."
        ),
    )
    topology_key: Annotated[str, AfterValidator(_topology_key)] = Field(
        default=HOSTNAME_KEY,
        max_length=253,
        json_schema_extra={"pattern": TOPOLOGY_KEY_PATTERN},
        description="Node label that `spread` is about. Default `kubernetes.io/hostname`: one stage on a node.",
    )
    colocate: Annotated[str | None, AfterValidator(_topology_key)] = Field(
        default=None,
        max_length=253,
        json_schema_extra={"pattern": TOPOLOGY_KEY_PATTERN},
        description=(
            "Node label whose value all stages of a group must share, such as `topology.kubernetes.io/zone` or a "
            "rack's, since hidden states cross between them at every step. By default they may be anywhere."
        ),
    )
    gang: GangSpec | None = Field(
        default=None,
        description=(
            "A scheduler that places all stages of a group at once, which the cluster must have. Default: the "
            "scheduler places pod by pod, and the operator gives back what a group holds in vain."
        ),
    )


class NetworkSpec(SpecBase):
    """The network between stages."""

    interface: Annotated[str | None, AfterValidator(_interface)] = Field(
        default=None,
        max_length=15,
        json_schema_extra={"pattern": INTERFACE_PATTERN},
        description=(
            "Network interface that activations take, such as `eth1`; NCCL and Gloo are told too. Default: the one "
            "with the pod's address."
        ),
    )
    transport: StageTransport = Field(
        default="auto",
        description=(
            "What carries hidden states and sampled tokens between stages: `auto` (default) takes NCCL where each "
            "stage has a device of its own, and else the runtime's own TCP connections; `gloo` takes torch's gloo, "
            "from GPUs through host memory."
        ),
    )
    rdma_resource: Annotated[str | None, AfterValidator(_resource)] = Field(
        default=None,
        max_length=253,
        json_schema_extra={"pattern": r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"},
        description=(
            "Extended resource of an RDMA device, such as `rdma/hca`: each stage gets one, and the IPC_LOCK "
            "capability, which restricted pod security forbids. Default: none."
        ),
    )
    tls: TlsSpec | None = Field(
        default=None,
        description=(
            "Mutual TLS between the model's pods: plans, tokens and hidden states never cross the network in clear. "
            "Tensors then go by TCP, between GPUs too. Default: what crosses between pods is in clear."
        ),
    )
    env: EnvVars = Field(
        default=(), description="Environment variables for the `stage` containers alone, such as NCCL's. Default: none."
    )
