"""How a rank starts to exchange with the others of its stage: through the host's memory, or by their devices.

The state inherited from its supervisor names the meeting point; a rank without a device needs only that. `JoinedRanks`
holds the checks and queries that the stage needs later.
"""

from dataclasses import dataclass, field
from typing import Final

import torch

from stageline_api.failures import FailureClass
from stageline_api.health import Phase
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.contract import PodContract
from stageline_runtime.models.protocol import CPU
from stageline_runtime.native.build import NativeUnavailableError
from stageline_runtime.plan_bus.messages import StepPlan
from stageline_runtime.ranks.device_ranks import DeviceRanks, RankBackend
from stageline_runtime.ranks.device_rendezvous import JOIN, RankMeeting, join_device_ranks
from stageline_runtime.ranks.exchange_times import ExchangeTimes
from stageline_runtime.ranks.shared_memory import SharedMemoryRanks
from stageline_runtime.ranks.stage_ranks import StageRanks
from stageline_runtime.stage.ranks.inherited import InheritedRank
from stageline_runtime.stage.ranks.shared_kernels import no_shared_memory
from stageline_runtime.stage.telemetry.progress import StageProgress
from stageline_runtime.stage.telemetry.watchdog import Watchdog

MEET: Final = "all-reduce, heartbeat"


@dataclass(frozen=True, slots=True)
class JoinedRanks:
    """Exchanges of a stage's process with the other ranks; a single rank has none."""

    ranks: StageRanks
    on_devices: DeviceRanks | None = None
    device: torch.device = CPU
    times: ExchangeTimes = field(default_factory=ExchangeTimes)
    """What exchanges within the compute took."""

    def meet(self, plan: StepPlan, watchdog: Watchdog) -> None:
        """In a heartbeat, exchange that this rank is there.

        Ranks that wait for work exchange nothing, so one that stands still would be missed by the next request alone.
        The others' watchdogs know which rank has not come.
        """
        of_stage = self.ranks.of_stage
        if of_stage.size > 1 and plan.is_heartbeat:
            with self.times.beside_compute():
                watchdog.watch(plan.seq, MEET, None)
                of_stage.all_reduce(torch.zeros(1, device=self.device), MEET)


def join_ranks(
    contract: PodContract,
    inherited: InheritedRank | None,
    accelerator: Accelerator | None,
    backend: RankBackend,
    progress: StageProgress,
    watchdog: Watchdog,
) -> JoinedRanks:
    """Meet the other ranks of the stage; `inherited` None: there are none.

    Raises:
        RuntimeFailure: as `no_shared_memory` and `join_device_ranks`.
        RanksEndedError: another rank has ended.
    """
    if inherited is None:
        return JoinedRanks(StageRanks())
    if accelerator is not None:
        return _by_devices(contract, inherited, accelerator, backend, progress, watchdog)
    try:
        ranks = SharedMemoryRanks(inherited.area, contract.rank, watchdog.exchange)
    except NativeUnavailableError as error:
        raise no_shared_memory(contract.ranks, error, JOIN) from error
    progress.exchanges = ranks.times
    shared = StageRanks(experts=ranks) if contract.config.expert > 1 else StageRanks(tensor=ranks)
    return JoinedRanks(shared, times=ranks.times)


def _by_devices(
    contract: PodContract,
    inherited: InheritedRank,
    accelerator: Accelerator,
    backend: RankBackend,
    progress: StageProgress,
    watchdog: Watchdog,
) -> JoinedRanks:
    timeouts = contract.config.timeouts
    meeting = RankMeeting(
        inherited.store,
        inherited.area,
        stage=contract.stage,
        rank=contract.rank,
        timeout_seconds=timeouts.rendezvous_seconds,
    )
    progress.enter(Phase.CONNECTING, "to the other ranks of the stage")
    # Twice: what joins says more than this can, where it gets to say anything.
    watchdog.watch_start(JOIN, 2 * timeouts.rendezvous_seconds)
    ranks = join_device_ranks(
        meeting,
        backend,
        accelerator,
        timeout_seconds=timeouts.rendezvous_seconds,
        step_timeout_seconds=timeouts.step_seconds,
    )
    watchdog.rest()
    watchdog.unfinished, ranks.observe = ranks.unfinished, watchdog.exchange
    progress.exchanges = ranks.times

    def await_all(purpose: str) -> None:
        meeting.meet(purpose, timeouts.load_seconds, FailureClass.MODEL_LOAD)

    if contract.config.expert > 1:
        shared = StageRanks(experts=ranks, await_all=await_all)
    else:
        shared = StageRanks(tensor=ranks, await_all=await_all)
    return JoinedRanks(shared, on_devices=ranks, device=accelerator.device, times=ranks.times)
