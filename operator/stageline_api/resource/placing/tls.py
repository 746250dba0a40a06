"""`spec.network.tls`: mutual TLS between a model's pods, and the fields that it excludes.

Features without TLS are refused together with the field, so that a model with it never sends unencrypted data.
"""

from typing import TYPE_CHECKING, Final

from pydantic import Field

from stageline_api.resource.base import SpecBase, cel
from stageline_api.resource.field_problem import FieldProblem, show_value
from stageline_api.resource.pods.scheduling import ClassName
from stageline_api.resource.serving.engine import EngineSpec, ParallelismSpec

if TYPE_CHECKING:
    from stageline_api.resource.placing.placement import NetworkSpec

_ENGINE_RULE: Final = "is for engine.name stageline only: the traffic between vLLM nodes has no TLS"
_RANKS_RULE: Final = "is for stages of one rank only: parallelism.tensor and parallelism.expert must be 1"
_ADDRESS_RULE: Final = "can't be used with network.tls, whose connections use the pods' own addresses: leave it out"
_RDMA_RULE: Final = "can't be used with network.tls: RDMA has no TLS, so it would stay unused"


class TlsSpec(SpecBase):
    """Mutual TLS between the pods of the model."""

    secret_name: ClassName = Field(
        description=(
            "Secret in the model's namespace with `tls.crt`, `tls.key` and `ca.crt`, as cert-manager writes them. The "
            "certificate must be for the DNS name `<model>-stages.<namespace>.svc`. Required."
        ),
    )


TLS_RULES: Final = (
    cel("!has(self.network.tls) || self.engine.name == 'stageline'", _ENGINE_RULE, ".network.tls"),
    cel(
        "!has(self.network.tls) || (self.parallelism.tensor == 1 && self.parallelism.expert == 1)",
        _RANKS_RULE,
        ".network.tls",
    ),
    cel("!has(self.network.tls) || !has(self.network.interface)", _ADDRESS_RULE, ".network.interface"),
    cel("!has(self.network.tls) || !has(self.network.rdmaResource)", _RDMA_RULE, ".network.rdmaResource"),
)
"""Rules that the API server checks on a spec with the field."""


def tls_problems(network: "NetworkSpec", engine: EngineSpec, parallelism: ParallelismSpec) -> list[FieldProblem]:
    """Problems of a spec with TLS: fields that it excludes."""
    if network.tls is None:
        return []
    problems = []
    if engine.name != "stageline":
        problems.append(FieldProblem(path="spec.network.tls", rule=_ENGINE_RULE))
    if parallelism.tensor != 1 or parallelism.expert != 1:
        problems.append(FieldProblem(path="spec.network.tls", rule=_RANKS_RULE))
    if network.interface is not None:
        value = show_value(network.interface)
        problems.append(FieldProblem(path="spec.network.interface", value=value, rule=_ADDRESS_RULE))
    if network.rdma_resource is not None:
        value = show_value(network.rdma_resource)
        problems.append(FieldProblem(path="spec.network.rdmaResource", value=value, rule=_RDMA_RULE))
    return problems
