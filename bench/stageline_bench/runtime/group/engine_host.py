"""An engine without HTTP: the real core, scheduler and plan bus, driven by rounds read from standard input.

`python -m stageline_bench.runtime.group.engine_host [--acceptance A] [--free-drafts] STAGE_ADDRESS…`, under the pod
contract. Writes one JSON line when ready, then reads one `RoundOrder` per line and answers each with a `RoundReport`.
It exits at the end of standard input.
"""

import argparse
import asyncio
import sys
import time
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from stageline_api.engine_http import ModelInfo
from stageline_api.health import Phase
from stageline_bench.runtime.group.scripted_drafts import ScriptedSpeculation
from stageline_bench.runtime.record.figures import RoundReport
from stageline_bench.runtime.record.scrape import StageScraper
from stageline_bench.runtime.record.stage_clock import StageSeconds
from stageline_runtime.contract import PodContract, read_contract
from stageline_runtime.engine.command import run_behind_stages
from stageline_runtime.engine.core import EngineCore
from stageline_runtime.engine.core_api import AdmittedRequest, CoreEvent, EndEvent, FailEvent, TokenEvent
from stageline_runtime.engine.draft_model import read_draft_model
from stageline_runtime.engine.group.stage_group import StageGroup, form_scheduler
from stageline_runtime.engine.scheduling.scheduler import Scheduler
from stageline_runtime.engine.telemetry.metrics import EngineMetrics
from stageline_runtime.engine.warm_up import warm_up
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.plan_bus.messages import RequestSampling, Shutdown
from stageline_runtime.prepare.cache import prepared_model_dir
from stageline_runtime.speculation.step_cost import FREE
from stageline_runtime.termination import RuntimeFailure, write_last_words

MAX_WAITING = 4096
LINE_LIMIT_BYTES = 1 << 26
TICK_SECONDS = 0.5
STEADY_SHARE = 8
"""A request counts as decoding steadily after 1/8 of its tokens and before the last 1/8."""


class RoundOrder(BaseModel):
    """One round: all prompts are submitted in one turn of the loop, not before `start_at_seconds`."""

    model_config = ConfigDict(frozen=True)

    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    """Empty: every answer has its full length."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    start_at_seconds: float = 0.0
    """On the monotonic clock; used to start engines together."""


class _Round:
    """The requests of one round, and the time in which all of them decode."""

    def __init__(self, core: EngineCore, order: RoundOrder) -> None:
        self._core = core
        self._order = order
        self.token_seconds: list[list[float]] = [[] for _ in order.prompts]
        self.outputs: list[list[int]] = [[] for _ in order.prompts]
        self.all_decoding = asyncio.Event()
        self.one_ending = asyncio.Event()
        self._edge_tokens = max(1, order.output_tokens // STEADY_SHARE)
        self._starting = len(order.prompts)

    async def run(self) -> None:
        """Submit all requests at once and read every answer to its end."""
        ended: list[asyncio.Future[None]] = []
        for index, prompt in enumerate(self._order.prompts):
            ended.append(asyncio.get_running_loop().create_future())
            request = AdmittedRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampling=RequestSampling(temperature=self._order.temperature, top_p=self._order.top_p, seed=index),
                max_new_tokens=self._order.output_tokens,
                stop_token_ids=frozenset(self._order.stop_token_ids),
            )
            self._core.submit(request, partial(self._take, index, ended[index]))
        await asyncio.gather(*ended)

    def _take(self, index: int, ended: asyncio.Future[None], event: CoreEvent) -> None:
        match event:
            case TokenEvent(token_ids=token_ids):
                self._count(self.token_seconds[index])
                self.outputs[index].extend(token_ids)
            case FailEvent(message=message):
                ended.set_exception(RuntimeError(message))
            case EndEvent():
                ended.set_result(None)

    def _count(self, times: list[float]) -> None:
        times.append(time.perf_counter())
        if len(times) == self._edge_tokens:
            self._starting -= 1
            if self._starting == 0:
                self.all_decoding.set()
        if len(times) == self._order.output_tokens - self._edge_tokens:
            self.one_ending.set()


class EngineHost:
    """One engine of a benchmark, from handshake to the end of its input."""

    def __init__(self, contract: PodContract, options: argparse.Namespace) -> None:
        scraper = StageScraper(options.addresses)
        self._options = options
        self._contract = contract
        self._scraper = scraper
        config = contract.config
        self._model_dir = prepared_model_dir(config.source, Path(config.cache_dir))
        self._model = read_model_config(self._model_dir)
        info = ModelInfo(
            served_name=config.served_name,
            max_model_len=config.max_model_len or self._model.context_length,
            vocab_size=self._model.vocab_size,
            eos_token_ids=(),
        )
        self._core = EngineCore(info, EngineMetrics(config.served_name))

    async def run(self) -> None:
        """Form the group, then run rounds until the input ends.

        Raises:
            RuntimeFailure: the group could not be formed or was lost.
        """
        group = StageGroup(
            self._contract,
            self._model,
            self._model_dir,
            on_step_done=self._core.step_done,
            on_drain_requested=lambda _stage: None,
            on_drafted=self._core.drafted,
            draft=read_draft_model(self._contract.config, self._model_dir),
        )
        rounds = asyncio.create_task(self._serve(group))
        while not rounds.done():
            await asyncio.wait((rounds, group.failure), timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if group.failure.done():
                raise group.failure.result()
            if self._core.status().phase is Phase.READY:
                self._core.beat_if_idle()
        group.expect_closing()
        group.broadcast(Shutdown("the end of the benchmark"))
        rounds.result()

    async def _serve(self, group: StageGroup) -> None:
        await group.listen()
        scheduler = await form_scheduler(group, MAX_WAITING)
        self._script_drafts(scheduler)
        self._core.attach(scheduler, group.broadcast)
        await warm_up(self._core.warm_up, group.max_step_tokens, self._model, scheduler.speculation)
        if self._options.free_drafts and scheduler.speculation is not None:
            scheduler.speculation.cost = FREE
        self._core.set_phase(Phase.READY)
        orders = await _standard_input()
        print('{"ready": true}', flush=True)  # noqa: T201 - standard output is this program's answer
        while line := await orders.readline():
            report = await self._run_round(RoundOrder.model_validate_json(line))
            print(report.model_dump_json(), flush=True)  # noqa: T201

    def _script_drafts(self, scheduler: Scheduler) -> None:
        speculation = scheduler.speculation
        if speculation is None:
            return
        if self._options.acceptance is not None:
            settings = (speculation.tokens, speculation.min_match, speculation.cost)
            scheduler.speculation = ScriptedSpeculation(*settings, acceptance=self._options.acceptance)

    async def _run_round(self, order: RoundOrder) -> RoundReport:
        work = _Round(self._core, order)
        before = await self._scraper.read_all()
        if (delay := order.start_at_seconds - time.perf_counter()) > 0:
            await asyncio.sleep(delay)
        cpu_before, submitted = time.process_time(), time.perf_counter()
        running = asyncio.create_task(work.run())
        steady = asyncio.create_task(self._read_steady(work))
        await running
        cpu_after = time.process_time()
        after = await self._scraper.read_all()
        # Its second reading began before the last stream ended, but may return later than the one above.
        was_steady = work.all_decoding.is_set() and work.one_ending.is_set()
        if not was_steady:
            steady.cancel()
        return RoundReport(
            submitted_seconds=submitted,
            token_seconds=tuple(map(tuple, work.token_seconds)),
            outputs=tuple(map(tuple, work.outputs)),
            engine_cpu_seconds=cpu_after - cpu_before,
            stages=tuple(late.since(early) for late, early in zip(after, before, strict=True)),
            steady_stages=await steady if was_steady else None,
        )

    async def _read_steady(self, work: _Round) -> tuple[StageSeconds, ...] | None:
        await work.all_decoding.wait()
        if work.one_ending.is_set():
            return None
        early = await self._scraper.read_all()
        if work.one_ending.is_set():
            return None
        await work.one_ending.wait()
        late = await self._scraper.read_all()
        return tuple(one.since(other) for one, other in zip(late, early, strict=True))


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("addresses", nargs="+")
    parser.add_argument("--acceptance", type=float, help="Drafts of this acceptance in place of the lookup.")
    parser.add_argument("--free-drafts", action="store_true", help="Drafts are made whatever they cost.")
    return parser.parse_args()


def main() -> None:
    """Run until the input ends; a failed group ends it with a termination message and its class's exit code."""
    run_behind_stages()
    try:
        host = EngineHost(read_contract(), _options())
        asyncio.run(host.run())
    except RuntimeFailure as failure:
        sys.exit(write_last_words(failure.message(None)))


if __name__ == "__main__":
    main()
