"""What lives as long as the gateway and is shared by all of its endpoints."""

from dataclasses import dataclass, field

from stageline_gateway.admission.admission import Admission
from stageline_gateway.client_stream import Cut
from stageline_gateway.fleet import Fleets
from stageline_gateway.served_models import ServedModels
from stageline_gateway.settings import GatewaySettings
from stageline_gateway.telemetry.metrics import GatewayMetrics
from stageline_gateway.telemetry.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Services:
    """Passed to every endpoint; one of each."""

    settings: GatewaySettings
    metrics: GatewayMetrics
    fleets: Fleets
    served: ServedModels
    """All that any of the fleets serves."""
    admission: Admission
    cut: Cut
    """Set when open answers must end now, with an error."""
    tracing: Tracing = field(default_factory=Tracing)
