"""`spec.placement` and `spec.network`: nodes that the stages of a group share, and the network between them."""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from stageline_api.resource.base import SpecBase, check_pattern
from stageline_api.resource.placing.gang import GangSpec
from stageline_api.resource.placing.tls import TlsSpec
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
            "Whether stages of a group may share a `topologyKey` domain. `Required`: no, a stage stays pending "
            "instead. `Preferred` (default): only if there is no other node. `None`: the scheduler decides."
        ),
    )
    topology_key: Annotated[str, AfterValidator(_topology_key)] = Field(
        default=HOSTNAME_KEY,
        max_length=253,
        json_schema_extra={"pattern": TOPOLOGY_KEY_PATTERN},
        description="Node label that `spread` uses. Default `kubernetes.io/hostname`: one stage on a node.",
    )
    colocate: Annotated[str | None, AfterValidator(_topology_key)] = Field(
        default=None,
        max_length=253,
        json_schema_extra={"pattern": TOPOLOGY_KEY_PATTERN},
        description=(
            "Node label that must be equal for all stages of a group, such as `topology.kubernetes.io/zone`; hidden "
            "states cross between stages at every step. Default: none."
        ),
    )
    gang: GangSpec | None = Field(
        default=None,
        description=(
            "Gang scheduler that places all stages of a group at once. The cluster must have it. Default: pods are "
            "scheduled one by one, and the operator releases the nodes of a group that is only partly placed."
        ),
    )


class NetworkSpec(SpecBase):
    """The network between stages."""

    interface: Annotated[str | None, AfterValidator(_interface)] = Field(
        default=None,
        max_length=15,
        json_schema_extra={"pattern": INTERFACE_PATTERN},
        description=(
            "Network interface for activations, such as `eth1`; NCCL and vLLM's Gloo use it too. Default: the "
            "interface of the pod's address."
        ),
    )
    rdma_resource: Annotated[str | None, AfterValidator(_resource)] = Field(
        default=None,
        max_length=253,
        json_schema_extra={"pattern": r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"},
        description=(
            "Extended resource of an RDMA device, such as `rdma/hca`. Each stage gets one, and the IPC_LOCK "
            "capability, which the restricted Pod Security profile forbids. Default: none."
        ),
    )
    tls: TlsSpec | None = Field(
        default=None,
        description=(
            "Mutual TLS between the model's pods for plans, tokens and hidden states. Tensors then use TCP, between "
            "GPUs too. Default: no encryption between pods."
        ),
    )
    env: EnvVars = Field(
        default=(), description=("Environment variables of the `stage` containers only, such as NCCL's. Default: none.")
    )
