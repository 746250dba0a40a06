"""How a stage and its engine meet: connect, say hello, wait for the welcome and the cache's size.

The stage waits without a limit of its own once it is connected: the engine has the clock for stages that don't come,
and the end of the engine ends the wait.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from stageline_api import ports
from stageline_api.errors import UserError
from stageline_api.failures import FailureClass
from stageline_api.health import Phase
from stageline_runtime.contract import PodContract, read_identity
from stageline_runtime.plan_bus.bus import BusClosedError, BusRefusedError, StageBus
from stageline_runtime.plan_bus.challenge import proof_of
from stageline_runtime.plan_bus.messages import (
    PROTOCOL_VERSION,
    CacheSized,
    Challenge,
    GroupFailed,
    Hello,
    LinkAddress,
    Place,
    Refused,
    Shutdown,
    Welcome,
)
from stageline_runtime.planning.cpu_features import cpu_features, has_bfloat16_units
from stageline_runtime.planning.this_machine import (
    available_bytes,
    container_identity,
    host_identity,
    memory_identity,
)
from stageline_runtime.prepare.cache import prepared_model_dir
from stageline_runtime.prepare.weights_digest import weights_digest
from stageline_runtime.stage.group_end import group_failure
from stageline_runtime.stage.telemetry.health import health_url
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.termination import RuntimeFailure

if TYPE_CHECKING:  # it knows torch, and supervisors of other engines shake hands too
    from stageline_runtime.accelerator.protocol import Accelerator

POLL_SECONDS = 0.5
_Wanted = TypeVar("_Wanted", Welcome, CacheSized)


def connect(contract: PodContract, progress: StageProgress) -> StageBus:
    """The plan bus to the group's engine.

    Raises:
        RuntimeFailure: class RendezvousTimeout; no engine answers in time, or TLS doesn't come about.
    """
    place = f"{contract.master_addr}:{ports.PLAN_BUS}"
    progress.enter(Phase.CONNECTING, f"to the engine at {place}")
    identity, limit_seconds = read_identity(contract.config), contract.meeting_seconds
    try:
        return StageBus.connect(contract.master_addr, ports.PLAN_BUS, limit_seconds, identity)
    except BusClosedError as error:
        detail = f"{error} (the engine at {place})"
        raise RuntimeFailure(FailureClass.RENDEZVOUS_TIMEOUT, detail, operation="tls") from error
    except TimeoutError as error:
        raise RuntimeFailure(FailureClass.RENDEZVOUS_TIMEOUT, str(error), operation="connect") from error


def say_hello(
    bus: StageBus,
    contract: PodContract,
    accelerator: "Accelerator | None",
    link_address: LinkAddress | None = None,
) -> None:
    """Answer the engine's challenge, and send this stage's identity and its address for the previous stage.

    Raises:
        RuntimeFailure: class RendezvousTimeout; the listener there sends no challenge.
    """
    nonce = _await_challenge(bus, contract)
    bus.send(
        Hello(
            protocol=PROTOCOL_VERSION,
            stage=contract.stage,
            stage_count=contract.stage_count,
            incarnation=contract.incarnation,
            proof=proof_of(contract.bus_token, nonce, Place(contract.stage, contract.rank), contract.incarnation),
            host=host_identity(),
            available_bytes=(available_bytes() if accelerator is None else accelerator.available_bytes()),
            health_url=health_url(contract.pod_ip),
            device="" if accelerator is None else accelerator.identity(),
            container=container_identity(),
            memory=memory_identity(),
            weights=_weights_of(contract),
            rank=contract.rank,
            ranks=contract.ranks,
            has_bfloat16_units=accelerator is not None or has_bfloat16_units(cpu_features()),
            queues_bfloat16_experts=_queues_bfloat16_experts(accelerator),
            link_address=link_address,
        )
    )


def _queues_bfloat16_experts(accelerator: "Accelerator | None") -> bool:
    if accelerator is None:
        return False
    import torch  # here, for the same reason

    return accelerator.queues_experts(torch.bfloat16)


def _weights_of(contract: PodContract) -> str:
    try:
        model_dir = prepared_model_dir(contract.config.source, Path(contract.config.cache_dir))
    except UserError:
        return ""  # the engine reads the same source, and reports its problem
    return weights_digest(model_dir)


def _await_challenge(bus: StageBus, contract: PodContract) -> str:
    try:
        message = bus.receive(contract.config.timeouts.rendezvous_seconds)
    except BusRefusedError as error:  # in TLS 1.3 the engine judges once this end is done
        raise RuntimeFailure(FailureClass.RENDEZVOUS_TIMEOUT, str(error), operation="tls") from error
    if isinstance(message, Challenge):
        return message.nonce
    if isinstance(message, Refused):
        detail = f"the engine refuses this stage: {message.detail}"
        raise RuntimeFailure(FailureClass.RENDEZVOUS_TIMEOUT, detail, operation="tls")
    detail = f"what listens at {contract.master_addr}:{ports.PLAN_BUS} did not greet this stage as an engine does"
    raise RuntimeFailure(FailureClass.RENDEZVOUS_TIMEOUT, detail, operation="handshake")


def await_welcome(bus: StageBus, own_stage: int, tell_drain: Callable[[StageBus], None]) -> Welcome | Shutdown:
    """Wait for the engine's word (`Shutdown`: it drained); `tell_drain` is called between looks.

    Raises:
        RuntimeFailure: the engine refused this stage, or the group failed.
    """
    return _await(Welcome, bus, own_stage, tell_drain)


def await_cache_size(bus: StageBus, own_stage: int, tell_drain: Callable[[StageBus], None]) -> CacheSized | Shutdown:
    """Wait for the cache's size, as `await_welcome`: with devices, until all stages have measured the memory left for
    it.

    Raises:
        RuntimeFailure: the group failed.
    """
    return _await(CacheSized, bus, own_stage, tell_drain)


def _await(
    wanted: type[_Wanted], bus: StageBus, own_stage: int, tell_drain: Callable[[StageBus], None]
) -> _Wanted | Shutdown:
    while True:
        message = bus.receive(POLL_SECONDS)
        tell_drain(bus)
        if isinstance(message, wanted | Shutdown):
            return message
        match message:
            case Refused(detail=detail):
                raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="handshake")
            case GroupFailed():
                raise group_failure(message, own_stage)
            case _:
                continue
