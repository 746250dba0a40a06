"""Captures a loaded stage's layers and its draft model's as graphs, and describes the result in a sentence.

The group's plans name the mode that each runs in, so a stage that can't provide that mode must not continue. A draft
model's steps belong to the stage alone: if they can't be captured they run eagerly, and the sentence says so.
"""

import logging

from stageline_api.failures import FailureClass
from stageline_api.health import Phase
from stageline_api.runtime_config import RuntimeConfig
from stageline_runtime.models.protocol import CapturesGraphs, CaptureSizes, GraphsUnavailableError, StageModel
from stageline_runtime.plan_bus.messages import GraphMode, Welcome
from stageline_runtime.plan_bus.step_plan import captured_step, decode_sizes, rows_per_cohort
from stageline_runtime.stage.load_draft import LoadedDraft
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.termination import RuntimeFailure

logger = logging.getLogger(__name__)


def capture(model: StageModel, config: RuntimeConfig, welcome: Welcome, progress: StageProgress) -> str:
    """Capture the graphs that the group's plans need; returns a sentence that names the captured parts.

    Raises:
        RuntimeFailure: class BadConfig, when graphs were asked for that this model or machine can't have.
    """
    graphs = welcome.graphs
    if graphs is GraphMode.OFF:
        account = f"graphs are off (spec.engine.graphs {config.graphs})"
        logger.info(account)
        return account
    try:
        if not isinstance(model, CapturesGraphs):
            raise GraphsUnavailableError("this model's layers can't be captured")
        report = model.capture_graphs(graphs, _sizes(welcome), lambda message: progress.enter(Phase.LOADING, message))
    except GraphsUnavailableError as error:
        detail = f"spec.engine.graphs {config.graphs} can't be had: {error}; set it to off or auto"
        raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="capture graphs") from error
    progress.memory_bytes += report.memory_bytes
    mebibytes = report.memory_bytes >> 20
    account = f"{report.graphs} graphs captured ({graphs}) in {report.seconds:.1f} s, {mebibytes} MiB"
    logger.info(account)
    return account


def capture_draft(draft: LoadedDraft, welcome: Welcome, progress: StageProgress) -> tuple[GraphMode, str]:
    """Capture the draft model's layers where the stage's are; what its steps may ask for, and what to say of it."""
    try:
        graphs, report = draft.capture(
            welcome.graphs,
            _sizes(welcome),
            lambda message: progress.enter(Phase.LOADING, f"the draft model: {message}"),
        )
    except GraphsUnavailableError as error:
        account = f"the draft model runs eagerly: {error}"
        logger.warning(account)
        return GraphMode.OFF, f"; {account}"
    if not report.graphs:
        return graphs, ""
    progress.memory_bytes += report.memory_bytes
    account = f"{report.graphs} graphs of the draft model in {report.seconds:.1f} s, {report.memory_bytes >> 20} MiB"
    logger.info(account)
    return graphs, f"; {account}"


def _sizes(welcome: Welcome) -> CaptureSizes:
    """Of the plans that a group has, so of the draft model's steps too."""
    return CaptureSizes(
        decode=decode_sizes(rows_per_cohort(welcome.num_slots, welcome.num_cohorts)),
        step=(captured_step(welcome.max_step_tokens),),
    )
