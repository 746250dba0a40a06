"""The engine's hold on its stages: handshake, the cut, and one ordered channel to all of them.

The engine waits for every stage's `Hello`, decides the cut and the cache from the model's config and the reported
memory, and welcomes all at once. From then on a connection that ends is a lost peer and ends the group.
"""

import asyncio
import hmac
import logging
import os
from collections.abc import Callable
from pathlib import Path

from stageline_api import ports
from stageline_api.failures import FailureClass
from stageline_api.runtime_config import LayerRange, RuntimeConfig
from stageline_api.timeline import GroupStages, StageEndpoint
from stageline_runtime.bus import EngineBusConnection, encode_frame
from stageline_runtime.contract import PodContract
from stageline_runtime.engine.sizing import CacheSize, MemoryShortageError, StageMemory, size_cache, weight_bytes
from stageline_runtime.messages import (
    PROTOCOL_VERSION,
    DrainRequested,
    Hello,
    Loaded,
    Ping,
    Pong,
    Refused,
    StepDone,
    ToEngine,
    ToStage,
    Welcome,
)
from stageline_runtime.model_config import ModelConfig
from stageline_runtime.planning.cut import CutError, NoRoomError, cut_layers, estimate_costs
from stageline_runtime.planning.memory import CutMemory, StageRoom
from stageline_runtime.termination import RuntimeFailure

logger = logging.getLogger(__name__)

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


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
    ) -> None:
        self._contract = contract
        self._model = model
        self._model_dir = model_dir
        self._on_step_done = on_step_done
        self._on_drain_requested = on_drain_requested
        self._on_pong = on_pong
        self._hellos: dict[int, Hello] = {}
        self._connections: dict[int, EngineBusConnection] = {}
        self._loaded: set[int] = set()
        self._progress = asyncio.Event()
        self._closing = False
        self.failure: asyncio.Future[RuntimeFailure] = asyncio.get_running_loop().create_future()
        """Resolves with the reason once the group can't go on."""

    @property
    def num_connected(self) -> int:
        """Stages that have said hello and are still there."""
        return len(self._connections)

    @property
    def num_loaded(self) -> int:
        """Stages that have loaded and met their peers."""
        return len(self._loaded)

    @property
    def dtype(self) -> str:
        """The dtype the group runs in, `auto` resolved."""
        return resolve_dtype(self._contract.config, self._model)

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
        """Ask one stage for its clock."""
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

    def expect_closing(self) -> None:
        """From now on a stage that leaves is no failure."""
        self._closing = True

    def _welcome(self) -> CacheSize:
        config = self._contract.config
        layers = self._cut()
        max_model_len = config.max_model_len or self._model.context_length
        element_bytes = ELEMENT_BYTES[self.dtype]
        last = self._contract.stage_count - 1
        stages = tuple(
            StageMemory(
                stage=stage,
                host=hello.host,
                available_bytes=hello.available_bytes,
                layers=layers[stage],
                weight_bytes=weight_bytes(
                    self._model,
                    layers[stage],
                    is_first=stage == 0,
                    is_last=stage == last,
                    element_bytes=element_bytes,
                ),
            )
            for stage, hello in sorted(self._hellos.items())
        )
        try:
            size = size_cache(
                stages,
                self._model,
                max_num_seqs=config.max_num_seqs,
                max_model_len=max_model_len,
                element_bytes=element_bytes,
            )
        except MemoryShortageError as error:
            raise RuntimeFailure(FailureClass.OUT_OF_MEMORY, str(error), operation="size the cache") from error
        admitted = size.num_cohorts * size.slots_per_cohort
        if admitted < config.max_num_seqs:
            logger.warning("memory holds %d sequences at once, not the %d asked for", admitted, config.max_num_seqs)
        for stage, connection in self._connections.items():
            connection.send_frame(encode_frame(self._welcome_message(stage, layers[stage], size)))
        return size

    def _welcome_message(self, stage: int, layers: LayerRange, size: CacheSize) -> Welcome:
        host = self._hellos[stage].host
        return Welcome(
            first_layer=layers.first,
            last_layer=layers.last,
            model_dir=str(self._model_dir),
            dtype=self.dtype,
            num_cohorts=size.num_cohorts,
            slots_per_cohort=size.slots_per_cohort,
            slot_tokens=size.slot_tokens,
            max_step_tokens=self._contract.config.max_num_batched_tokens,
            stages_on_host=sum(hello.host == host for hello in self._hellos.values()),
        )

    def _cut(self) -> tuple[LayerRange, ...]:
        costs = estimate_costs(self._model)
        try:
            return cut_layers(
                self._model.num_layers,
                self._contract.stage_count,
                layer_cost=costs.layer,
                embedding_cost=costs.embedding,
                head_cost=costs.head,
                explicit=self._contract.config.stage_layers,
                memory=self._room(),
            )
        except NoRoomError as error:
            raise RuntimeFailure(FailureClass.OUT_OF_MEMORY, str(error), operation="cut the layers") from error
        except CutError as error:
            raise RuntimeFailure(FailureClass.BAD_CONFIG, str(error), operation="cut the layers") from error

    def _room(self) -> CutMemory:
        return CutMemory(
            config=self._model,
            rooms=tuple(
                StageRoom(host=hello.host, available_bytes=hello.available_bytes)
                for _, hello in sorted(self._hellos.items())
            ),
            max_model_len=self._contract.config.max_model_len or self._model.context_length,
            element_bytes=ELEMENT_BYTES[self.dtype],
        )

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

    def _greet(self, connection: EngineBusConnection, hello: Hello) -> None:
        refusal = self._refusal(hello)
        if refusal is not None:
            logger.warning("refused a stage: %s", refusal)
            connection.send_frame(encode_frame(Refused(refusal)))
            connection.close()
            return
        connection.stage = hello.stage
        self._hellos[hello.stage] = hello
        self._connections[hello.stage] = connection
        self._progress.set()

    def _refusal(self, hello: Hello) -> str | None:
        contract = self._contract
        if not hmac.compare_digest(hello.token.encode(), contract.bus_token.encode()):
            return "the plan bus token is wrong"
        if hello.protocol != PROTOCOL_VERSION:
            return f"protocol version {hello.protocol} does not match the engine's {PROTOCOL_VERSION}"
        if hello.incarnation != contract.incarnation:
            return f"incarnation {hello.incarnation} is not this group's {contract.incarnation}"
        if hello.stage_count != contract.stage_count or not 0 <= hello.stage < contract.stage_count:
            return f"stage {hello.stage} of {hello.stage_count} has no place among {contract.stage_count}"
        if hello.stage in self._hellos:
            return f"stage {hello.stage} is connected already"
        return None

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


def resolve_dtype(config: RuntimeConfig, model: ModelConfig) -> str:
    """`auto` means the dtype the model's own config names."""
    return model.dtype if config.dtype == "auto" else config.dtype
