"""The engine's connections to its stages: handshake, the cut, and one ordered channel to all of them.

The engine waits for every stage's `Hello`, decides the cut from the model's config and the reported memory, and
sends all welcomes at once. It sizes the cache once all stages on devices have measured their remaining memory;
without such stages, at once. After the welcome a connection that ends is a lost peer and ends the group.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from stageline_api import ports
from stageline_api.failures import FailureClass
from stageline_api.runtime_config import SpeculativeConfig
from stageline_api.telemetry.timeline import GroupStages, StageEndpoint
from stageline_runtime.contract import PodContract, read_identity
from stageline_runtime.engine.group.rank_results import RankResults, ReadyCounts
from stageline_runtime.engine.group.stage_ranks import check_devices_of_ranks, hellos_of_stages, measured_of_stages
from stageline_runtime.engine.group.strangers import Strangers
from stageline_runtime.engine.group.welcome import (
    DraftModel,
    measuring_stages,
    refusal_of,
    size_loaded_cache,
    welcome_stages,
    welcome_supervisors,
)
from stageline_runtime.engine.scheduling.cache_sizing import CacheSize
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.plan_bus.bus import EngineBusConnection, encode_frame
from stageline_runtime.plan_bus.challenge import GREETING_BYTES
from stageline_runtime.plan_bus.messages import (
    BusProtocolError,
    CacheSized,
    Computing,
    Drafted,
    DrainRequested,
    GraphMode,
    GuideReady,
    Hello,
    Loaded,
    Measured,
    PeerComputes,
    Ping,
    Place,
    Pong,
    PrepareGuide,
    Refused,
    StepDone,
    StepTimes,
    ToEngine,
    ToStage,
    Welcome,
)
from stageline_runtime.speculation.speculation import Speculation
from stageline_runtime.speculation.step_cost import FREE
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.tls.certificates import PodIdentity
from stageline_runtime.tls.channel import TlsChannel

logger = logging.getLogger(__name__)


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
        on_guide_ready: Callable[[GuideReady], None] = lambda _ready: None,
        on_drafted: Callable[[Drafted], None] = lambda _drafted: None,
        draft: DraftModel | None = None,
    ) -> None:
        """`draft` is the model that the last stage drafts with."""
        self._contract = contract
        self.config = contract.config
        self.draft = draft
        self.model = model
        self._model_dir = model_dir
        self._on_drain_requested = on_drain_requested
        self._on_pong = on_pong
        self._on_cache_sized = on_cache_sized
        self._on_step_times = on_step_times
        self._on_guide_ready = on_guide_ready
        self._hellos: dict[Place, Hello] = {}
        self._connections: dict[Place, EngineBusConnection] = {}
        self._strangers = Strangers()
        self._identity: PodIdentity | None = None
        self._measured: dict[Place, Measured] = {}
        self._loaded: set[Place] = set()
        samplers = contract.config.expert
        self._on_step_done, self._on_drafted = on_step_done, on_drafted
        if samplers > 1:
            results = RankResults(samplers, on_step_done, on_drafted)
            self._on_step_done, self._on_drafted = results.step_done, results.drafted
        self._guides = ReadyCounts(samplers)
        self._progress = asyncio.Event()
        self._closing = False
        self.graphs = GraphMode.OFF
        """The most that the group's plans may ask for; known once stages are welcomed."""
        self.max_step_tokens = 0
        """Maximum tokens of a plan; known once stages are welcomed."""
        self._computed_at = float("-inf")
        self.failure: asyncio.Future[RuntimeFailure] = asyncio.get_running_loop().create_future()
        """Resolves with the reason once the group has failed."""

    @property
    def _all_places(self) -> frozenset[Place]:
        contract = self._contract
        return frozenset(Place(stage, rank) for stage in range(contract.stage_count) for rank in range(contract.ranks))

    @property
    def _stage_hellos(self) -> dict[int, Hello]:
        return hellos_of_stages(self._hellos)

    @property
    def num_connected(self) -> int:
        """Stages of which every rank is there."""
        return self._whole_stages(self._connections)

    @property
    def num_loaded(self) -> int:
        """The same, of which every rank has loaded."""
        return self._whole_stages(self._loaded)

    def _whole_stages(self, places: Iterable[Place]) -> int:
        ranks = Counter(place.stage for place in places)
        return sum(count == self._contract.ranks for count in ranks.values())

    @property
    def weights(self) -> str:
        """Digest of the weights that all stages hold; empty until one has reported it."""
        return next((hello.weights for _, hello in sorted(self._hellos.items()) if hello.weights), "")

    async def listen(self) -> None:
        """Open the bus; raises RuntimeFailure when its port can't be had, or the model's certificate can't be used."""
        self._identity = read_identity(self.config)
        loop = asyncio.get_running_loop()
        host = self._contract.pod_ip
        try:
            await loop.create_server(self._new_connection, host, ports.PLAN_BUS)
        except OSError as error:
            # asyncio puts a sentence of its own in place of the system's.
            detail = f"can't listen on {host}:{ports.PLAN_BUS}: {os.strerror(error.errno or 0)}"
            raise RuntimeFailure(FailureClass.INTERNAL, detail, operation="listen") from error

    def _new_connection(self) -> EngineBusConnection:
        channel = None if self._identity is None else TlsChannel(self._identity, is_server=True)
        return EngineBusConnection(self._receive, self._lost, self._strangers.greet, GREETING_BYTES, channel)

    async def form(self) -> CacheSize:
        """Handshake with every stage, welcome them, wait until all have loaded.

        Raises:
            RuntimeFailure: a stage did not come or load in time, or the cut or the cache can't be made.
        """
        await self._all_connected()
        check_devices_of_ranks(self._hellos, self.config)
        welcomes = welcome_stages(
            self._stage_hellos, self._contract, self.model, self._model_dir, self.draft, tuple(self._hellos.values())
        )
        logger.info("computing in %s: %s", welcomes[0].dtype, welcomes[0].dtype_reason)
        self.graphs, self.max_step_tokens = welcomes[0].graphs, welcomes[0].max_step_tokens
        logger.info("limits: %d requests at once, %d tokens a step", welcomes[0].num_slots, self.max_step_tokens)
        self._send_welcomes(welcomes)
        began = asyncio.get_running_loop().time()
        await self._all_in(self._measured, self._measuring_places(), spent_seconds=0.0)
        size = self._size_cache(welcomes)
        spent_seconds = asyncio.get_running_loop().time() - began
        await self._all_in(self._loaded, self._all_places, spent_seconds=spent_seconds)
        return size

    def _measuring_places(self) -> frozenset[Place]:
        stages = measuring_stages(self._stage_hellos)
        return frozenset(place for place in self._all_places if place.stage in stages)

    async def form_nodes(self) -> None:
        """Like `form`, but each stage is a node of another engine, which sizes its own cache.

        Raises:
            RuntimeFailure: a stage did not connect or load in time, or the cut can't be made.
        """
        await self._all_connected()
        self._send_welcomes(welcome_supervisors(self._stage_hellos, self._contract, self.model, self._model_dir))
        await self._all_in(self._loaded, self._all_places, spent_seconds=0.0)

    def broadcast(self, message: ToStage) -> None:
        """Send one message to all stages, encoded once."""
        frame = encode_frame(message)
        for connection in self._connections.values():
            connection.send_frame(frame)

    def ping(self, stage: int, message: Ping) -> None:
        """Ping a stage's first rank; its clock counts as the stage's clock."""
        self._connections[Place(stage)].send_frame(encode_frame(message))

    def prepare_guide(self, message: PrepareGuide) -> None:
        """Ask the ranks of the last stage that sample; one that is gone ends the group anyway."""
        frame = encode_frame(message)
        for rank in range(self.config.expert):
            sampler = self._connections.get(Place(self._contract.stage_count - 1, rank))
            if sampler is not None:
                sampler.send_frame(frame)

    def connected_stages(self) -> GroupStages:
        """The connected stages that have sent a hello, and their addresses."""
        return GroupStages(
            served_name=self.config.served_name,
            stage_count=self._contract.stage_count,
            incarnation=self._contract.incarnation,
            stages=tuple(
                StageEndpoint(stage=stage, health_url=hello.health_url, host=hello.host)
                for stage, hello in sorted(self._stage_hellos.items())
                if Place(stage) in self._connections
            ),
        )

    def is_beside_engine(self, stage: int) -> bool:
        """Whether a stage runs on the engine's machine, which is stage 0's, and so shares its monotonic clock."""
        here, first = self._hellos.get(Place(stage)), self._hellos.get(Place(0))
        return here is not None and first is not None and here.host == first.host

    def seconds_since_computing(self) -> float:
        """Seconds since a stage last reported that it still computes a long plan."""
        return time.monotonic() - self._computed_at

    def expect_closing(self) -> None:
        """From now on a stage that leaves is no failure."""
        self._closing = True

    def _size_cache(self, welcomes: Mapping[int, Welcome]) -> CacheSize:
        config = self.config
        measured = measured_of_stages(self._measured)
        size = size_loaded_cache(self._stage_hellos, welcomes, measured, config, self.model, self.draft)
        self._on_cache_sized(size)
        if not size.holds_all:
            logger.warning(
                "memory holds %d tokens of %d sequences at once; long ones may have to wait",
                size.num_tokens,
                size.num_slots,
            )
        self.broadcast(CacheSized(size.num_blocks))
        return size

    def _send_welcomes(self, welcomes: Mapping[int, Welcome]) -> None:
        """To each rank with the address of the same rank of the next stage."""
        for place, connection in self._connections.items():
            after = self._hellos[Place((place.stage + 1) % self._contract.stage_count, place.rank)]
            welcome = msgspec.structs.replace(welcomes[place.stage], next_address=after.link_address)
            connection.send_frame(encode_frame(welcome))

    async def _all_connected(self) -> None:
        await self._until(
            self._hellos,
            self._all_places,
            self._contract.meeting_seconds,
            FailureClass.RENDEZVOUS_TIMEOUT,
            "handshake",
        )

    async def _all_in(self, done: Collection[Place], expected: frozenset[Place], *, spent_seconds: float) -> None:
        """Wait until `done` has all `expected` places; of the time for loading, `spent_seconds` are gone."""
        limit = self.config.timeouts.load_seconds
        await self._until(done, expected, limit, FailureClass.MODEL_LOAD, "load", spent_seconds)

    async def _until(
        self,
        done: Collection[Place],
        expected: frozenset[Place],
        timeout_seconds: float,
        failure_class: FailureClass,
        operation: str,
        spent_seconds: float = 0.0,
    ) -> None:
        try:
            async with asyncio.timeout(timeout_seconds - spent_seconds):
                while not expected.issubset(done):
                    if self.failure.done():
                        raise self.failure.result()
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError as error:
            missing = sorted(expected.difference(done))
            names = " and ".join(place.words(self._contract.ranks) for place in missing)
            detail = f"{names} did not finish the {operation} within {timeout_seconds:g} s"
            raise RuntimeFailure(failure_class, detail, operation=operation, peer=missing[0].stage) from error

    def fail(self, error: Exception) -> None:
        """End the group for a bug of the engine: no stage is the cause."""
        logger.error("the engine failed unexpectedly", exc_info=error)
        detail = f"a bug in the engine: {type(error).__name__}: {error}"
        self._end(RuntimeFailure(FailureClass.INTERNAL, detail, operation="take a result"))

    def _end(self, failure: RuntimeFailure) -> None:
        if not self.failure.done():
            self.failure.set_result(failure)
        self._progress.set()

    def _receive(self, connection: EngineBusConnection, message: ToEngine) -> None:
        try:
            self._take(connection, message)
        except BusProtocolError:
            raise
        except Exception as error:
            # asyncio would close the connection, and a healthy stage would count as lost.
            self.fail(error)

    def _take(self, connection: EngineBusConnection, message: ToEngine) -> None:
        place = connection.place
        match message:
            case Hello():
                self._greet(connection, message)
            case _ if place is None:
                connection.close()
            case Measured() | Loaded() | DrainRequested() if message.stage != place.stage:
                raise BusProtocolError(f"{type(message).__name__}.stage is {message.stage}")
            case StepDone() | Drafted() | GuideReady() if place.stage != self._contract.stage_count - 1:
                raise BusProtocolError(f"{type(message).__name__} is the last stage's to send")
            case Measured():
                self._measured[place] = message
                self._progress.set()
            case Loaded():
                self._loaded.add(place)
                self._progress.set()
            case StepDone():
                self._on_step_done(message)
            case Drafted():
                self._on_drafted(message)
            case Computing():
                self._computed_at = time.monotonic()
                self.broadcast(PeerComputes(message.seq))
            case DrainRequested():
                self._on_drain_requested(place.stage)
            case Pong():
                self._on_pong(place.stage, message)
            case GuideReady():
                if self._guides.is_last(message.number):
                    self._on_guide_ready(message)
            case StepTimes():
                if self._on_step_times is not None:
                    self._on_step_times(place.stage, message)

    def _greet(self, connection: EngineBusConnection, hello: Hello) -> None:
        refusal = refusal_of(hello, self._contract, self._hellos, self._strangers.forget(connection))
        if refusal is not None:
            self._strangers.tell(f"refused a stage: {refusal}")
            connection.send_frame(encode_frame(Refused(refusal)))
            connection.close()
            return
        connection.trust()
        connection.place = place = Place(hello.stage, hello.rank)
        self._hellos[place] = hello
        self._connections[place] = connection
        self._progress.set()

    def _lost(self, connection: EngineBusConnection, reason: str) -> None:
        self._strangers.forget(connection)
        place = connection.place
        if place is None and connection.fault:
            self._strangers.tell(f"refused a connection to the plan bus from {connection.address}: {reason}")
        if place is None or self._closing:
            return
        self._connections.pop(place, None)
        what = "broke the plan bus's protocol" if connection.fault else "is gone"
        detail = f"{place.words(self._contract.ranks)} {what}: {reason}"
        self._end(RuntimeFailure(FailureClass.PEER_LOST, detail, operation="plan bus", peer=place.stage))


async def form_scheduler(group: StageGroup, max_waiting: int) -> Scheduler:
    """Form the group and make the scheduler for what its stages hold.

    Raises:
        RuntimeFailure: the group could not be formed.
    """
    size, config = await group.form(), group.config
    return Scheduler(
        SlotLedger.of(size, prefix_cache=config.prefix_cache),
        max_step_tokens=group.max_step_tokens,
        max_waiting=max_waiting,
        graphs=group.graphs,
        speculation=None if config.speculative is None else _speculation(config.speculative, group.draft),
    )


def _speculation(config: SpeculativeConfig, draft: DraftModel | None) -> Speculation:
    """Drafts with zero cost; the warm-up measures the cost."""
    context_tokens = 0 if draft is None else draft.config.context_length
    return Speculation(
        config.tokens,
        config.min_match,
        FREE,
        draft_context_tokens=context_tokens,
        has_draft_model=draft is not None,
        num_recent_answers=config.recent_answers,
    )
