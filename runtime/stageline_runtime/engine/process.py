"""The life of an engine: read the model, answer HTTP, form the group, warm it up, serve, drain, end with a reason."""

import asyncio
import logging
import signal
from pathlib import Path
from typing import Any

from stageline_api.engine_http import ModelInfo, SamplingParams
from stageline_api.errors import UserError
from stageline_api.failures import ExitCode, FailureClass
from stageline_api.health import Phase
from stageline_api.standing_heap import settle_heap
from stageline_runtime.contract import PodContract, read_engine_keys, read_served
from stageline_runtime.engine.core import EngineCore
from stageline_runtime.engine.core_life import CoreLife
from stageline_runtime.engine.draft_model import read_draft_model
from stageline_runtime.engine.edge.http_server import serving
from stageline_runtime.engine.edge.multiplexed import MultiplexedConnections
from stageline_runtime.engine.edge.routes import build_app
from stageline_runtime.engine.edge.state_routes import add_stage_routes, build_state_app
from stageline_runtime.engine.group.stage_group import StageGroup
from stageline_runtime.engine.group.stage_probe import StageProbe
from stageline_runtime.engine.group.welcome import DraftModel
from stageline_runtime.engine.guided_requests import GuidedRequests
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.engine.telemetry.tracing import TracedRequests, open_tracing
from stageline_runtime.engine.text.prompts import NO_DEFAULTS, PromptReader
from stageline_runtime.engine.text.sampling_defaults import read_sampling_defaults
from stageline_runtime.engine.text.schema_check import SchemaCheck
from stageline_runtime.model_facts.model_config import ModelConfig, UnsupportedModelError
from stageline_runtime.plan_bus.messages import GroupFailed, Shutdown
from stageline_runtime.prepare.cache import prepared_model_dir
from stageline_runtime.termination import RuntimeFailure, write_drained, write_last_words
from stageline_runtime.tls.served import ServedCertificate

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
LINGER_SECONDS = 5
"""How long clients may take to read the end of their streams once the engine ends."""
WATCHDOG_GRACE_SECONDS = 5.0
"""Stages' own watchdogs name the operation that hangs, so they go first."""
CAUSE_SECONDS = 2.0
"""How long a failed warm-up waits for the report of the stage that caused it."""
HANG_SHARE = 0.9
"""Of the step limit: a stage's own watchdog ends it at the limit, and that may be what the engine sees."""


class EngineProcess:
    """One engine from start to end; `run` returns the exit code."""

    def __init__(self, contract: PodContract, core_class: type[CoreLife] = EngineCore) -> None:
        """`core_class` fits the stages of this group."""
        self._contract = contract
        self._core_class = core_class
        self._tracing: TracedRequests | None = None
        self._keys: tuple[str, ...] = ()
        self._served: ServedCertificate | None = None

    async def run(self) -> ExitCode:
        """Serve until drained (0) or until something fails (the code of its class)."""
        try:
            self._keys = read_engine_keys(self._contract.pod_ip)
            self._served = read_served(self._contract.config)
            model_dir, model = self._read_model()
            prompts = self._read_prompts(model_dir, model)
            draft = read_draft_model(self._contract.config, model_dir)
            asked_by = await self._serve(model_dir, model, prompts, draft)
        except RuntimeFailure as failure:
            return write_last_words(failure.message(None))
        except Exception as error:
            # A bug: the log gets its traceback, the termination message one line.
            logger.exception("the engine failed unexpectedly")
            return write_last_words(_as_failure(error).message(None))
        finally:
            # Clients have had their answers; a collector that is down holds the end up for a bounded time only.
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
        return write_drained(None, asked_by)

    async def _serve(self, model_dir: Path, model: ModelConfig, prompts: PromptReader, draft: DraftModel | None) -> str:
        served_name = self._contract.config.served_name
        info = ModelInfo(
            served_name=served_name,
            max_model_len=prompts.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(sorted(prompts.eos_token_ids)),
        )
        metrics = EngineMetrics(served_name)
        probe = StageProbe(self._contract.stage_count, metrics)
        tracing = self._tracing = open_tracing(
            self._contract, lambda stage: 0 if group.is_beside_engine(stage) else probe.offset(stage)
        )
        core = self._core_class.of(self._contract, info, metrics, tracing, model_dir, prompts)
        guided = GuidedRequests(
            SchemaCheck(model_dir, info.vocab_size, info.eos_token_ids),
            lambda message: group.prepare_guide(message),
            lambda: core.stages_prepare_guides and core.status().phase is Phase.READY,
        )
        group = StageGroup(
            self._contract,
            model,
            model_dir,
            on_step_done=core.step_done,
            on_drain_requested=lambda stage: core.start_drain(f"SIGTERM to stage {stage}"),
            on_pong=probe.answered,
            on_cache_sized=metrics.cache_sized,
            on_step_times=None if tracing is None else tracing.step_reported,
            on_guide_ready=guided.answered,
            on_drafted=core.drafted,
            draft=draft,
        )
        connections = MultiplexedConnections()
        app = build_app(core, prompts, guided.prepare, connections, keys=self._keys)
        add_stage_routes(app, group.connected_stages, probe.report)
        state_app = build_state_app(core, group.connected_stages, probe.report)
        core.report_bug = group.fail
        core.stages_connected = lambda: group.num_connected
        core.stages_loaded = lambda: group.num_loaded
        core.weights = lambda: group.weights
        tls = None if self._served is None else self._served.context
        async with serving(
            app,
            state_app,
            self._contract.pod_ip,
            linger_seconds=LINGER_SECONDS,
            before_end=connections.leave,
            tls=tls,
        ):
            for each in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(each, core.start_drain, f"{each.name} to the engine")
            try:
                await self._run_to_the_end(core, group, probe)
            finally:
                await guided.close()
        await core.close()
        return core.drain_asked_by

    async def _run_to_the_end(self, core: CoreLife, group: StageGroup, probe: StageProbe) -> None:
        """Notifies clients and stages how it ended; raises a failure again."""
        try:
            await self._form_and_run(core, group, probe)
        except Exception as error:
            failure = _as_failure(error)
            hung = core.seconds_without_progress() >= self._contract.config.timeouts.step_seconds * HANG_SHARE
            core.fail_all(f"the group failed: {failure.detail}", hung)
            group.expect_closing()
            lost_stage = failure.peer if failure.failure_class is FailureClass.PEER_LOST else None
            group.broadcast(GroupFailed(lost_stage, failure.detail))
            raise
        group.expect_closing()
        group.broadcast(Shutdown(core.drain_asked_by))

    async def _form_and_run(self, core: CoreLife, group: StageGroup, probe: StageProbe) -> None:
        core.set_phase(Phase.CONNECTING, "waiting for the stages")
        await group.listen()
        forming = asyncio.create_task(self._form(core, group))
        stopping = asyncio.create_task(core.drain_asked.wait())
        await _first_of(forming, stopping)
        if not forming.done():
            forming.cancel()
            return
        stopping.cancel()
        forming.result()
        if not core.drain_asked.is_set():
            settle_heap()
            core.set_phase(Phase.READY)
            logger.info("ready: %s over %d stages", self._contract.config.served_name, self._contract.stage_count)
        await self._watch(core, group, probe)

    async def _form(self, core: CoreLife, group: StageGroup) -> None:
        await core.form(group)
        core.set_phase(Phase.WARMING)
        await self._warm_up(core, group)

    async def _warm_up(self, core: CoreLife, group: StageGroup) -> None:
        """One step through all stages; a watchdog can't detect a stage that never starts it."""
        warming = asyncio.create_task(core.run_first_steps(group))
        # Each stage's first step is slow, and they come one after the other.
        limit = self._contract.config.timeouts.step_seconds * self._contract.stage_count + WATCHDOG_GRACE_SECONDS
        left = limit
        while left > 0 and not warming.done() and not group.failure.done():
            await _first_of(warming, group.failure, timeout_seconds=left)
            left = limit - group.seconds_since_computing()
        has_ended = warming.done()
        if has_ended and warming.exception() is None:
            return
        warming.cancel()
        # A stage's own report of its end takes precedence, though it may arrive a moment later.
        await _first_of(group.failure, timeout_seconds=CAUSE_SECONDS)
        if group.failure.done():
            raise group.failure.result()
        if has_ended:
            warming.result()
        detail = f"the warm-up step did not finish within {limit:g} s"
        raise RuntimeFailure(FailureClass.STEP_TIMEOUT, detail, operation="wait for the last stage")

    async def _watch(self, core: CoreLife, group: StageGroup, probe: StageProbe) -> None:
        """Heartbeats while idle, the step limit while busy, clocks at all times; returns once drained."""
        limit = self._contract.config.timeouts.step_seconds + WATCHDOG_GRACE_SECONDS
        drained = asyncio.create_task(core.drained.wait())
        while not drained.done():
            await _first_of(drained, group.failure, timeout_seconds=TICK_SECONDS)
            if group.failure.done():
                raise group.failure.result()
            if min(core.seconds_without_progress(), group.seconds_since_computing()) > limit:
                raise core.stall(limit)
            core.beat_if_idle()
            probe.ask(range(self._contract.stage_count), group.ping)
            if self._tracing is not None:
                self._tracing.tick()
            if self._served is not None:
                self._served.look()

    def _read_model(self) -> tuple[Path, ModelConfig]:
        config = self._contract.config
        try:
            model_dir = prepared_model_dir(config.source, Path(config.cache_dir))
        except UserError as error:
            raise RuntimeFailure(FailureClass.BAD_CONFIG, error.message, operation="read the source") from error
        try:
            model = self._core_class.read_model(model_dir)
        except UnsupportedModelError as error:
            raise RuntimeFailure(FailureClass.MODEL_LOAD, str(error), operation="read the model's config") from error
        return model_dir, model

    def _read_prompts(self, model_dir: Path, model: ModelConfig) -> PromptReader:
        asked = self._contract.config.max_model_len
        if asked is not None and asked > model.context_length and not self._core_class.takes_longer_contexts:
            detail = f"spec.engine.maxModelLen {asked} is larger than the model's context of {model.context_length}"
            raise RuntimeFailure(FailureClass.BAD_CONFIG, detail, operation="check maxModelLen")
        return PromptReader.load(
            model_dir,
            vocab_size=model.vocab_size,
            max_model_len=asked or model.context_length,
            eos_token_ids=model.eos_token_ids,
            sampling_defaults=self._sampling_defaults(model_dir),
        )

    def _sampling_defaults(self, model_dir: Path) -> SamplingParams:
        follows = self._contract.config.generation_config == "model"
        return read_sampling_defaults(model_dir) if follows else NO_DEFAULTS


def _as_failure(error: Exception) -> RuntimeFailure:
    if isinstance(error, RuntimeFailure):
        return error
    return RuntimeFailure(FailureClass.INTERNAL, f"{type(error).__name__}: {error}")


async def _first_of(*futures: asyncio.Future[Any], timeout_seconds: float | None = None) -> None:
    """Wait until one of the futures is done, or the time is up; none is cancelled."""
    await asyncio.wait(futures, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
