"""How a stage and its engine meet: connect, say hello, wait to be welcomed, refused or told that it is over.

The stage waits without a limit of its own once it is connected: the engine has the clock for stages that don't come,
and the end of the engine ends the wait.
"""

from collections.abc import Callable

from stageline_api import ports
from stageline_api.failures import FailureClass
from stageline_api.health import Phase
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.contract import PodContract
from stageline_runtime.plan_bus.bus import StageBus
from stageline_runtime.plan_bus.messages import PROTOCOL_VERSION, GroupFailed, Hello, Refused, Shutdown, Welcome
from stageline_runtime.planning.this_machine import available_bytes, host_identity
from stageline_runtime.stage.failures import group_failure
from stageline_runtime.stage.telemetry.health import health_url
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.termination import RuntimeFailure

POLL_SECONDS = 0.5


def connect(contract: PodContract, progress: StageProgress) -> StageBus:
    """The plan bus to the group's engine.

    Raises:
        RuntimeFailure: class RendezvousTimeout, when no engine answers in time.
    """
    progress.enter(Phase.CONNECTING, f"to the engine at {contract.master_addr}:{ports.PLAN_BUS}")
    try:
        return StageBus.connect(contract.master_addr, ports.PLAN_BUS, contract.config.timeouts.rendezvous_seconds)
    except TimeoutError as error:
        raise RuntimeFailure(FailureClass.RENDEZVOUS_TIMEOUT, str(error), operation="connect") from error


def say_hello(bus: StageBus, contract: PodContract, accelerator: Accelerator | None) -> None:
    bus.send(
        Hello(
            protocol=PROTOCOL_VERSION,
            stage=contract.stage,
            stage_count=contract.stage_count,
            incarnation=contract.incarnation,
            token=contract.bus_token,
            host=host_identity(),
            available_bytes=(available_bytes() if accelerator is None else accelerator.available_bytes()),
            health_url=health_url(contract.pod_ip),
            device="" if accelerator is None else accelerator.identity(),
        )
    )


def await_welcome(bus: StageBus, own_stage: int, tell_drain: Callable[[StageBus], None]) -> Welcome | Shutdown:
    """Wait for the engine's word (`Shutdown`: it drained); `tell_drain` is called between looks.

    Raises:
        RuntimeFailure: the engine refused this stage, or the group failed.
    """
    while True:
        message = bus.receive(POLL_SECONDS)
        tell_drain(bus)
        match message:
            case Welcome() | Shutdown():
                return message
            case Refused(detail=detail):
                raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="handshake")
            case GroupFailed():
                raise group_failure(message, own_stage)
            case _:
                continue
