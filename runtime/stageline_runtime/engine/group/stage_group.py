"""The engine's hold on its stages: handshake, the cut, and one ordered channel to all of them.

The engine waits for every stage's `Hello`, decides the cut and the cache from the model's config and the reported
memory, and welcomes all at once. From then on a connection that ends is a lost peer and ends the group.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stageline_api import ports
from stageline_api.failures import FailureClass
from stageline_api.runtime_config import RuntimeConfig
from stageline_api.telemetry.timeline import GroupStages, StageEndpoint
from stageline_runtime.contract import PodContract
from stageline_runtime.engine.group.welcome import choose_graphs, refusal_of, welcome_stages
from stageline_runtime.engine.scheduling.cache_sizing import CacheSize
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.plan_bus.bus import EngineBusConnection, encode_frame
from stageline_runtime.plan_bus.messages import (
    DrainRequested,
    GraphMode,
    Hello,
    Loaded,
    Ping,
    Pong,
    Refused,
    StepDone,
    StepTimes,
    ToEngine,
    ToStage,
)
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS
from stageline_runtime.termination import RuntimeFailure

logger = logging.getLogger(__name__)

_WARM_UP_TOKENS: Final = 8


class StageGroup:
    """The connected stages of one incarnation. All methods run on the engine's event loop."""

    def __init__(
        self,
        contract: PodContract,
        model: ModelConfig,
        model_dir: Path,
        *,
        on_step_done: Callable[[StepDone], None],
        on_drain_requested: Callable[[int], None],
        on_pong: Callable[[int, Pong], None] = lambda _stage, _pong: None,
        on_cache_sized: Callable[[CacheSize], None] = lambda _size: None,
        on_step_times: Callable[[int, StepTimes], None] | None = None,
    ) -> None:
        self._contract = contract
        self._model = model
        self._model_dir = model_dir
        self._on_step_done = on_step_done
        self._on_drain_requested = on_drain_requested
        self._on_pong = on_pong
        self._on_cache_sized = on_cache_sized
        self._on_step_times = on_step_times
        self._hellos: dict[int, Hello] = {}
        self._connections: dict[int, EngineBusConnection] = {}
        self._loaded: set[int] = set()
        self._progress = asyncio.Event()
        self._closing = False
        self.failure: asyncio.Future[RuntimeFailure] = asyncio.get_running_loop().create_future()
        """Resolves with the reason once the group can't go on."""

    @property
    def num_connected(self) -> int:
        return len(self._connections)

    @property
    def num_loaded(self) -> int:
        return len(self._loaded)

    async def listen(self) -> None:
        """Open the bus; raises RuntimeFailure when its port can't be had."""
        loop = asyncio.get_running_loop()
        host = self._contract.pod_ip
        try:
            await loop.create_server(lambda: EngineBusConnection(self._receive, self._lost), host, ports.PLAN_BUS)
        except OSError as error:
            # asyncio puts a sentence of its own in place of the system's.
            detail = f"can't listen on {host}:{ports.PLAN_BUS}: {os.strerror(error.errno or 0)}"
            raise RuntimeFailure(FailureClass.INTERNAL, detail, operation="listen") from error

    async def form(self) -> CacheSize:
        """Handshake with every stage, welcome them, wait until all have loaded.

        Raises:
            RuntimeFailure: a stage did not come or load in time, or the cut or the cache can't be made.
        """
        timeouts = self._contract.config.timeouts
        count = self._contract.stage_count
        await self._until(
            lambda: len(self._hellos) == count,
            timeouts.rendezvous_seconds,
            FailureClass.RENDEZVOUS_TIMEOUT,
            "handshake",
        )
        size = self._welcome()
        await self._until(lambda: len(self._loaded) == count, timeouts.load_seconds, FailureClass.MODEL_LOAD, "load")
        return size

    def broadcast(self, message: ToStage) -> None:
        """Send one message to all stages, encoded once."""
        frame = encode_frame(message)
        for connection in self._connections.values():
            connection.send_frame(frame)

    def ping(self, stage: int, message: Ping) -> None:
        self._connections[stage].send_frame(encode_frame(message))

    def connected_stages(self) -> GroupStages:
        """The stages that have said hello and are still there, and where they answer."""
        return GroupStages(
            served_name=self._contract.config.served_name,
            stage_count=self._contract.stage_count,
            incarnation=self._contract.incarnation,
            stages=tuple(
                StageEndpoint(stage=stage, health_url=self._hellos[stage].health_url, host=self._hellos[stage].host)
                for stage in sorted(self._connections)
            ),
        )

    def is_beside_engine(self, stage: int) -> bool:
        """Whether a stage runs on the engine's machine, which is stage 0's, and so shares its monotonic clock."""
        return stage in self._hellos and 0 in self._hellos and self._hellos[stage].host == self._hellos[0].host

    @property
    def graphs(self) -> GraphMode:
        """The most that the group's plans may ask for; known once all stages have said hello."""
        return choose_graphs(self._contract.config.graphs, self._hellos.values(), self._model)

    def expect_closing(self) -> None:
        """From now on a stage that leaves is no failure."""
        self._closing = True

    def _welcome(self) -> CacheSize:
        size, welcomes = welcome_stages(self._hellos, self._contract, self._model, self._model_dir)
        self._on_cache_sized(size)
        if not size.holds_all:
            tokens, asked = size.num_blocks * BLOCK_TOKENS, self._contract.config.max_num_seqs
            logger.warning("memory holds %d tokens of %d sequences at once; long ones may have to wait", tokens, asked)
        for stage, connection in self._connections.items():
            connection.send_frame(encode_frame(welcomes[stage]))
        return size

    async def _until(
        self, condition: Callable[[], bool], timeout_seconds: float, failure_class: FailureClass, operation: str
    ) -> None:
        try:
            async with asyncio.timeout(timeout_seconds):
                while not condition():
                    if self.failure.done():
                        raise self.failure.result()
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError as error:
            done = self._loaded if operation == "load" else self._hellos.keys()
            missing = [stage for stage in range(self._contract.stage_count) if stage not in done]
            names = ", ".join(f"stage {stage}" for stage in missing)
            detail = f"{names} did not finish the {operation} within {timeout_seconds:g} s"
            raise RuntimeFailure(failure_class, detail, operation=operation, peer=missing[0]) from error

    def _receive(self, connection: EngineBusConnection, message: ToEngine) -> None:
        match message:
            case Hello():
                self._greet(connection, message)
            case _ if connection.stage is None:
                connection.close()
            case Loaded():
                self._loaded.add(connection.stage)
                self._progress.set()
            case StepDone():
                self._on_step_done(message)
            case DrainRequested():
                self._on_drain_requested(connection.stage)
            case Pong():
                self._on_pong(connection.stage, message)
            case StepTimes():
                if self._on_step_times is not None:
                    self._on_step_times(connection.stage, message)

    def _greet(self, connection: EngineBusConnection, hello: Hello) -> None:
        refusal = refusal_of(hello, self._contract, self._hellos)
        if refusal is not None:
            logger.warning("refused a stage: %s", refusal)
            connection.send_frame(encode_frame(Refused(refusal)))
            connection.close()
            return
        connection.stage = hello.stage
        self._hellos[hello.stage] = hello
        self._connections[hello.stage] = connection
        self._progress.set()

    def _lost(self, connection: EngineBusConnection, reason: str) -> None:
        if connection.stage is None or self._closing:
            return
        self._connections.pop(connection.stage, None)
        if not self.failure.done():
            detail = f"stage {connection.stage} is gone: {reason}"
            self.failure.set_result(
                RuntimeFailure(FailureClass.PEER_LOST, detail, operation="plan bus", peer=connection.stage)
            )
        self._progress.set()


async def form_scheduler(group: StageGroup, config: RuntimeConfig, max_waiting: int) -> Scheduler:
    """Form the group and make the scheduler for what its stages hold.

    Raises:
        RuntimeFailure: the group could not be formed.
    """
    size = await group.form()
    return Scheduler(
        SlotLedger.of(size, prefix_cache=config.prefix_cache),
        max_step_tokens=config.max_num_batched_tokens,
        max_waiting=max_waiting,
        graphs=group.graphs,
    )


def warm_up_tokens(config: RuntimeConfig) -> int:
    return min(_WARM_UP_TOKENS, config.max_num_batched_tokens)
