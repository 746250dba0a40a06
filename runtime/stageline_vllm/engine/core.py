"""The engine's core over vLLM: it queues requests, submits as many as vLLM accepts at once and receives their tokens.

The engine owns the queue, as with its own runtime: ordered by priority, then arrival, bounded, and reported to
waiting clients. vLLM never holds more than `max_num_seqs` of our requests, so its order decides only which request
loses KV blocks. This core notifies the stages whether work is outstanding. Nothing here blocks; each request has
one task that sleeps until tokens arrive.
"""

import asyncio
import logging
import time
from bisect import insort
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import httpx

from stageline_api import ports
from stageline_api.engine_http import ErrorCode, FinishReason, ModelInfo
from stageline_api.failures import FailureClass
from stageline_api.health import Phase
from stageline_runtime.contract import PodContract
from stageline_runtime.engine.core_api import AdmittedRequest, AnswerSink
from stageline_runtime.engine.core_life import MAX_WAITING, CoreLife, RequestLoad
from stageline_runtime.engine.errors import PromptError
from stageline_runtime.engine.group.stage_group import StageGroup
from stageline_runtime.engine.telemetry.metrics import EngineMetrics, Occupancy
from stageline_runtime.engine.telemetry.tracing import TracedRequests
from stageline_runtime.engine.text.prompts import PromptReader
from stageline_runtime.guided.grammar_walk import GrammarWalk, WalkMaker
from stageline_runtime.guided.json_grammars import GrammarError, JsonGrammars
from stageline_runtime.model_facts.foreign_model import read_foreign_model
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.plan_bus.messages import ToStage
from stageline_runtime.termination import RuntimeFailure
from stageline_vllm.addresses import http_host
from stageline_vllm.engine.generate_words import VllmAnswerError
from stageline_vllm.engine.generation import Generation, VllmServer, generate_one_token
from stageline_vllm.engine.grammar_words import WorkersGrammars
from stageline_vllm.engine.prompt_words import asks_for_prompt, most_answer_bytes
from stageline_vllm.engine.response_reader import LINE_LIMIT_BYTES
from stageline_vllm.engine.vllm_exchange import VllmUnreachableError
from stageline_vllm.engine.vllm_figures import VllmFigures, read_figures
from stageline_vllm.server_key import authorization, server_key

logger = logging.getLogger(__name__)

COMPILING_SHARE: Final = 4
"""At most one in this many of vLLM's places may be held by answers whose grammars are being compiled."""
MOST_COMPILING: Final = 8
"""Upper bound of that number, since grammars are compiled one at a time."""
FIGURES_SECONDS: Final = 5.0
"""How often vLLM's own metrics are read while it works."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    request: AdmittedRequest
    number: int

    @property
    def seniority(self) -> tuple[int, int]:
        return self.request.priority, self.number


@dataclass(frozen=True, slots=True)
class _Running:
    generation: Generation
    task: "asyncio.Task[None]"


class VllmCore(CoreLife):
    """Implements `EngineCoreApi` over vLLM's HTTP server."""

    stalled_words = "vLLM made no step"
    takes_longer_contexts = True
    needs_step_plans = False
    stages_prepare_guides = False
    """vLLM's worker compiles a grammar for an extra request that precedes the one that needs it (`grammar_words`)."""

    def __init__(
        self,
        info: ModelInfo,
        metrics: EngineMetrics,
        tracing: TracedRequests | None,
        server: VllmServer,
        *,
        max_running: int,
        max_waiting: int,
        adapters: Iterable[str] = (),
        group: int | None = None,
        incarnation: int | None = None,
    ) -> None:
        """`max_running` is vLLM's own `--max-num-seqs`."""
        super().__init__(info, metrics, tracing, group=group, incarnation=incarnation)
        self._server = server
        self._walks = WalkMaker(server.grammars, GrammarWalk)
        self._workers_grammars = WorkersGrammars(max_running)
        self.adapters = frozenset(adapters)
        self._max_running, self._max_waiting = max_running, max_waiting
        self._numbers = 0
        self._waiting: list[_Waiting] = []
        self._running: dict[str, _Running] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._stands = False
        self._events = 0
        self._progress_at = time.monotonic()
        self._figures = VllmFigures()
        self._figures_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        headers = {"authorization": authorization(server.key)}
        self._http = httpx.AsyncClient(timeout=FIGURES_SECONDS, trust_env=False, headers=headers)

    # -- life of the engine ------------------------------------------------------------------------------------

    @staticmethod
    def read_model(model_dir: Path) -> ModelConfig:
        """As `CoreLife`."""
        return read_foreign_model(model_dir)

    @classmethod
    def of(
        cls,
        contract: PodContract,
        info: ModelInfo,
        metrics: EngineMetrics,
        tracing: TracedRequests | None,
        model_dir: Path,
        prompts: PromptReader,
    ) -> Self:
        """Over vLLM's server in the pod of stage 0, which is the engine's own."""
        grammars = JsonGrammars(model_dir, info.vocab_size, prompts.eos_token_ids)
        key = server_key(contract.bus_token, contract.group, contract.incarnation)
        return cls(
            info,
            metrics,
            tracing,
            VllmServer(http_host(contract.pod_ip), ports.VLLM_HTTP, key, prompts.eos_token_ids, grammars),
            max_running=contract.config.step_limits(on_gpus=False).max_num_seqs,
            max_waiting=MAX_WAITING,
            adapters=(adapter.name for adapter in contract.config.lora_adapters),
            group=contract.group,
            incarnation=contract.incarnation,
        )

    async def form(self, group: StageGroup) -> None:
        """As `CoreLife`; the stages are supervisors of vLLM's nodes."""
        await group.form_nodes()
        self.attach(group.broadcast)

    async def run_first_steps(self, _group: StageGroup) -> None:
        """As `CoreLife`."""
        try:
            await self.warm_up()
        except (VllmUnreachableError, VllmAnswerError) as error:
            raise RuntimeFailure(FailureClass.INTERNAL, str(error), operation="ask vLLM for a token") from error

    def attach(self, send: Callable[[ToStage], None]) -> None:
        """The group is complete: vLLM runs on all stages. `send` notifies them whether work is outstanding."""
        self._send = send
        self._stands = True

    async def warm_up(self) -> None:
        """One token through all stages, and the tokenizer read as grammars need it, here and by vLLM's worker.

        Raises:
            VllmUnreachableError, VllmAnswerError: vLLM does not give it.
        """
        await generate_one_token(self._server)
        with suppress(GrammarError):  # reported when a request needs it
            await asyncio.wrap_future(self._walks.load())

    def is_running(self, request_id: str) -> bool:
        return request_id in self._running

    def seconds_without_progress(self) -> float:
        return time.monotonic() - self._progress_at if self._running else 0.0

    def beat_if_idle(self) -> None:
        """Read vLLM's metrics when due; they also count steps that delivered no token."""
        due = time.monotonic() - self._figures_at >= FIGURES_SECONDS
        if due and self._reading is None:
            self._reading = asyncio.create_task(self._read_figures())

    def fail_all(self, message: str, hung: bool = False) -> None:
        super().fail_all(message, hung)
        for running in list(self._running.values()):
            self._let_go(running)
        self._running.clear()
        self._waiting.clear()

    async def close(self) -> None:
        """Cancel all requests that vLLM still runs."""
        if self._reading is not None:
            self._reading.cancel()
        for running in list(self._running.values()):
            self._let_go(running)
        await asyncio.gather(*self._leaving, return_exceptions=True)
        self._walks.close()
        await self._http.aclose()

    # -- EngineCoreApi -----------------------------------------------------------------------------------------

    def submit(self, request: AdmittedRequest, sink: AnswerSink) -> None:
        """Queue a request; its events go to `sink`. Raises EngineRefusal when it can't be accepted now, or ever."""
        self._check_room(request)
        self._check_prompt(request)
        self._numbers += 1
        insort(self._waiting, _Waiting(request, self._numbers), key=lambda each: each.seniority)
        self._streams.open(request, sink)
        self._want_pump()

    def _check_prompt(self, request: AdmittedRequest) -> None:
        """Raise and count the PromptError if vLLM's line of prompt log probabilities would be too long."""
        if asks_for_prompt(request) and (most := most_answer_bytes(request)) > LINE_LIMIT_BYTES:
            self._metrics.requests.refused(ErrorCode.INVALID_VALUE)
            asked = request.sampling.num_top_prompt_logprobs
            message = (
                f"What vLLM says of {len(request.prompt_token_ids)} prompt tokens, with prompt_logprobs = {asked}, may "
                f"come to {most} bytes; at most {LINE_LIMIT_BYTES} are read."
            )
            raise PromptError(ErrorCode.INVALID_VALUE, message, param="prompt_logprobs")

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:
            self._let_go(running)
        else:
            self._waiting = [each for each in self._waiting if each.request.request_id != request_id]
        self._streams.abort(request_id, reason)
        self._want_pump()

    def steps_while_queued(self, request_id: str) -> int | None:
        if request_id not in self._streams or request_id in self._running:
            return None
        return self._events + self._figures.steps

    def load(self) -> RequestLoad:
        waiting = len(self._waiting)
        room = max(0, self._max_waiting - waiting) if self._stands else None
        return RequestLoad(len(self._running), waiting, room, self._max_running, self._figures.kv_usage)

    def metrics_page(self, accept: str = "") -> tuple[bytes, str]:
        """All series; those from vLLM's own metrics are up to `FIGURES_SECONDS` old."""
        self._streams.show_waiting()
        if not self._stands:
            return self._metrics.page(None, accept)
        figures = self._figures
        held = round(figures.kv_usage * figures.kv_blocks)
        # vLLM counts reusable cached blocks as free, and doesn't count them separately.
        blocks = {"held": held, "free": figures.kv_blocks - held} if figures.kv_blocks else {}
        load = self.load()
        occupancy = Occupancy(running=load.running, waiting=load.waiting, kv_usage=figures.kv_usage, kv_blocks=blocks)
        return self._metrics.page(occupancy, accept)

    # -- requests to vLLM --------------------------------------------------------------------------------------

    def _pump(self) -> None:
        if self._phase not in (Phase.READY, Phase.DRAINING):
            return
        self._say_outstanding(bool(self._waiting or self._running))
        while len(self._running) < self._max_running and (waiting := self._next()) is not None:
            self._waiting.remove(waiting)
            self._start(waiting)
        self._check_drained()

    def _next(self) -> _Waiting | None:
        """The first in the queue.

        One with an uncompiled grammar is passed over while too many of vLLM's places wait for grammars.
        """
        compiling = sum(each.generation.awaits_grammar for each in self._running.values())
        if compiling < min(MOST_COMPILING, max(1, self._max_running // COMPILING_SHARE)):
            return self._waiting[0] if self._waiting else None
        return next((each for each in self._waiting if not self._is_new(each.request.sampling.json_schema)), None)

    def _is_new(self, schema: str | None) -> bool:
        return schema is not None and self._workers_grammars.is_new(schema)

    def _start(self, waiting: _Waiting) -> None:
        if not self._running:
            self._progress_at = time.monotonic()
        generation = Generation(
            waiting.request,
            waiting.number,
            self._server,
            self._walks,
            self._workers_grammars,
            self._streams,
            self._heard,
            self._want_pump,
        )
        task = asyncio.create_task(self._run(generation))
        self._running[waiting.request.request_id] = _Running(generation, task)

    async def _run(self, generation: Generation) -> None:
        try:
            await generation.run()
        finally:
            name = generation.request.request_id
            running = self._running.get(name)
            if running is not None and running.generation is generation:
                del self._running[name]
            self._want_pump()

    def _let_go(self, running: _Running) -> None:
        running.generation.leave()
        running.task.cancel()
        self._leaving.add(running.task)
        running.task.add_done_callback(self._leaving.discard)

    def _heard(self) -> None:
        self._events += 1
        self._progress_at = time.monotonic()

    # -- vLLM's own figures ------------------------------------------------------------------------------------

    async def _read_figures(self) -> None:
        try:
            response = await self._http.get(f"http://{self._server.host}:{self._server.port}/metrics")
            if response.is_success:
                self._take_figures(read_figures(response.text))
        except (httpx.HTTPError, ValueError) as error:
            # Whether vLLM lives is its supervisors' to say.
            logger.warning("vLLM's metrics can't be read: %s", type(error).__name__)
        finally:
            self._figures_at = time.monotonic()
            self._reading = None

    def _take_figures(self, new: VllmFigures) -> None:
        old, self._figures = self._figures, new
        if new.steps > old.steps:
            self._progress_at = time.monotonic()
        self._metrics.counted_elsewhere(max(0, new.steps - old.steps), max(0, new.preemptions - old.preemptions))
        self._metrics.requests.looked_up(
            max(0, new.prefix_queries - old.prefix_queries), max(0, new.prefix_hits - old.prefix_hits)
        )
