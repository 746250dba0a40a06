"""`spec.network.transport`: what carries tensors between stages, and where that can't be chosen."""

from typing import TYPE_CHECKING, Final, Literal

from stageline_api.resource.base import cel
from stageline_api.resource.field_problem import FieldProblem, show_value
from stageline_api.resource.serving.engine import EngineSpec

if TYPE_CHECKING:
    from stageline_api.resource.placing.placement import NetworkSpec

StageTransport = Literal["auto", "gloo"]
_ENGINE_RULE: Final = "is for engine.name stageline only: vLLM chooses by itself what its nodes talk by"
_TLS_RULE: Final = "is not taken with network.tls: torch's builds of gloo have no TLS"

TRANSPORT_RULES: Final = (
    cel("self.network.transport == 'auto' || self.engine.name == 'stageline'", _ENGINE_RULE, ".network.transport"),
    cel("self.network.transport == 'auto' || !has(self.network.tls)", _TLS_RULE, ".network.transport"),
)
"""What the API server checks of a spec with the field."""


def transport_problems(network: "NetworkSpec", engine: EngineSpec) -> list[FieldProblem]:
    """What a spec with the field asks for and can't have."""
    if network.transport == "auto":
        return []
    rules = [_ENGINE_RULE] * (engine.name != "stageline") + [_TLS_RULE] * (network.tls is not None)
    value = show_value(network.transport)
    return [FieldProblem(path="spec.network.transport", value=value, rule=rule) for rule in rules]
