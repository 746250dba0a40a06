"""A group's end: how a stage requests it from the engine and learns of it. Without torch, for supervisors too."""

from stageline_api.failures import FailureClass
from stageline_api.health import Phase
from stageline_runtime.plan_bus.bus import StageBus
from stageline_runtime.plan_bus.messages import DrainRequested, GroupFailed
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.termination import RuntimeFailure


def ask_to_drain(bus: StageBus, progress: StageProgress) -> None:
    """Ask the engine to drain the group, once: this stage was asked to end."""
    if progress.phase is not Phase.DRAINING:
        progress.enter(Phase.DRAINING)
        bus.send(DrainRequested(progress.stage))


def group_failure(message: GroupFailed, own_stage: int) -> RuntimeFailure:
    """What the engine's `GroupFailed` means here: a lost peer is named, all else is the engine's failure."""
    if message.lost_stage is None or message.lost_stage == own_stage:
        return RuntimeFailure(
            FailureClass.ENGINE_LOST, f"the engine ended the group: {message.detail}", operation="plan bus"
        )
    return RuntimeFailure(
        FailureClass.PEER_LOST,
        f"the engine lost stage {message.lost_stage}: {message.detail}",
        operation="plan bus",
        peer=message.lost_stage,
    )
