"""Whether this engine sends spans, decided once at its start by the standard OTEL_* variables."""

import logging
from collections.abc import Callable

from stageline_api.errors import UserError
from stageline_api.telemetry.span_export import SpanExport, is_collector_named
from stageline_runtime.contract import PodContract
from stageline_runtime.engine.telemetry.tracing import NoTracing, TracedRequests

logger = logging.getLogger(__name__)

SERVICE: str = "stageline-engine"


def open_tracing(contract: PodContract, clock_offset: Callable[[int], int | None]) -> NoTracing | TracedRequests:
    """Tracing to the collector that the environment names, or none.

    A setting that can't be used is no reason not to serve: the log says so, and no span is sent. `clock_offset` gives
    a stage's clock minus `time.perf_counter_ns` here, None while that isn't known.
    """
    if not is_collector_named():
        return NoTracing()
    config = contract.config
    identity = {
        "service.namespace": config.namespace,
        "service.instance.id": f"{config.model_name}-{contract.group}-{contract.incarnation}",
        "stageline.model": config.model_name,
        "stageline.group": str(contract.group),
        "stageline.incarnation": str(contract.incarnation),
        "stageline.stages": str(contract.stage_count),
    }
    try:
        export = SpanExport(SERVICE, identity)
    except UserError as error:
        logger.warning("no spans are sent: %s", error.message)
        return NoTracing()
    from stageline_runtime.engine.telemetry.span_sender import OtelSpanSender

    logger.info("spans of traced requests are sent to an OpenTelemetry collector")
    return TracedRequests(OtelSpanSender(export, config.served_name), contract.stage_count, clock_offset)
