"""Whole groups whose stages learn late what their device has done: same tokens, same order, nothing twice or lost.

Real runners, scheduler and local transport in seeded interleavings, as on the CPU; here a plan's results come out of
events that are done only after a drawn number of looks, feedback stays in tensors, and plans overtake their results.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chaos.broken_draft_model_rules import BROKEN_DRAFT_MODEL_RULES
from chaos.drafting_workloads import drafting_workload
from chaos.interleaving import DeadlockError, Interleaving
from chaos.local_engine import LocalEngine
from chaos.local_group import LocalModel, LocalStage, _never, drafter_of, run_group
from chaos.local_transport import LocalNetwork, WireError
from chaos.local_workloads import draw_workload
from chaos.ranked_workloads import ranked_workload
from oracles.scripted_drafts import MODELS, Drafting
from oracles.simulated_accelerator import ImmediateAccelerator, LateAccelerator, LateEvent
from stageline_runtime.plan_bus.messages import (
    BusProtocolError,
    Place,
    PlanRow,
    RequestSampling,
    Shutdown,
    SlotFill,
    StepDone,
    StepPlan,
)
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS
from stageline_runtime.ranks.protocol import RankGroup
from stageline_runtime.ranks.stage_ranks import StageRanks
from stageline_runtime.stage.ranks.joining import JoinedRanks
from stageline_runtime.stage.step.drafter import Drafter
from stageline_runtime.stage.step.in_flight import DeviceMarks, InFlight
from stageline_runtime.stage.step.pending_drafts import DraftingRow
from stageline_runtime.stage.step.pending_rows import PendingRows
from stageline_runtime.stage.step.runner import StageRunner
from stageline_runtime.stage.step.sampling_state import SamplingState
from stageline_runtime.stage.telemetry.state_clock import IDLE, BusyKind, StateClock, WaitReason
from stageline_runtime.stage.telemetry.watchdog import Watchdog


class DeviceStage(LocalStage):
    """A stage's process as on a device: it goes on to the next plan while earlier ones are in flight."""

    def __init__(
        self,
        place: Place,
        ranks: RankGroup,
        model: LocalModel,
        engine: LocalEngine,
        network: LocalNetwork,
        interleaving: Interleaving,
    ) -> None:
        super().__init__(place, ranks, model, engine, network, interleaving)
        stage = place.stage
        accelerator = LateAccelerator(stage)
        clock = StateClock(lambda: interleaving.turns)
        watchdog = Watchdog(float("inf"), lambda: False, _never)
        marks = DeviceMarks(accelerator.main, watchdog)
        self._joined = JoinedRanks(StageRanks(experts=ranks), device=accelerator.device)
        self._in_flight = InFlight(accelerator, clock, watchdog, marks)
        self._runner = StageRunner(
            model.stages[stage * engine.workload.num_ranks + place.rank],
            network.transport(stage, engine.workload.num_stages, hidden_size=model.hidden_size, dtype=model.dtype),
            marks,
            marks,
            stage=stage,
            stage_count=engine.workload.num_stages,
            num_slots=engine.workload.num_slots,
            hidden_size=model.hidden_size,
            dtype=model.dtype,
            device=accelerator,
            drafter=drafter_of(engine.workload, accelerator) if stage == engine.workload.num_stages - 1 else None,
        )

    def live(self) -> None:
        mailbox = self._engine.mailboxes[self.place]
        while True:
            self._interleaving.wait_until(lambda: bool(mailbox or self._plans or self._in_flight), "a plan or a result")
            while mailbox:
                message = mailbox.popleft()
                if isinstance(message, Shutdown):
                    assert not self._plans
                    while self._in_flight:  # done, or the engine would not have ended; only not looked at yet
                        self._finish()
                    return
                self._runner.accept(self._part(message))
                self._plans.append(message)
            if self._plans:
                whole = self._plans.popleft()
                plan = self._part(whole)
                self._joined.meet(whole, self._watchdog)
                sampled = self._runner.run(plan)
                self._in_flight.add(plan, sampled)
                self._finish()
                if (drafts := self._runner.draft(plan)) is not None:
                    self._in_flight.add_drafts(plan, sampled, drafts)
            self._finish()

    def _finish(self) -> None:
        for plan, rows, drafted in self._in_flight.finished():
            if drafted is not None:
                assert self.ran[-1] == plan.seq, f"drafts of plan {plan.seq} come after plan {self.ran[-1]}"
                self._engine.done.append(drafted)
                continue
            self.ran.append(plan.seq)
            if self._runner.is_last:
                self._engine.done.append(StepDone(plan.seq, rows, self._runner.take_reports(plan)))


@given(st.integers(0, 100_000))
def test_every_order_gives_the_same_tokens(seed: int) -> None:
    with mock.patch("chaos.local_group.LocalStage", DeviceStage):
        run_group(draw_workload(random.Random(seed)), seed)


def test_ranks_with_a_device_each_keep_to_their_own_cache_in_any_order() -> None:
    """Experts are divided."""
    seen: Counter[str] = Counter()
    with mock.patch("chaos.local_group.LocalStage", DeviceStage):
        for seed in range(RUNS_WITH_DRAFTS):
            workload = ranked_workload(seed, 1 + seed % 2, Drafting.RANDOM)
            try:
                seen += run_group(workload, seed).seen
            except Exception as error:
                error.add_note(f"seed {seed}")
                raise
    expected = {"verifying row", "preemption", "idle rank"}
    assert expected <= {what for what, times in seen.items() if times >= 3}, seen


@pytest.mark.parametrize("drafting", Drafting)
@pytest.mark.parametrize("num_stages", [3, *(pytest.param(count, marks=pytest.mark.soak) for count in (1, 2))])
def test_drafts_are_verified_in_any_order(num_stages: int, drafting: Drafting) -> None:
    seen: Counter[str] = Counter()
    with mock.patch("chaos.local_group.LocalStage", DeviceStage):
        for seed in range(RUNS_WITH_DRAFTS):
            try:
                seen += run_group(drafting_workload(seed, num_stages, drafting), seed).seen
            except Exception as error:
                error.add_note(f"num_stages {num_stages}, seed {seed}")
                raise
    expected = {"verifying row", "preemption"}
    if drafting in MODELS:
        expected |= {"drafted by the model"}
    assert expected <= {what for what, times in seen.items() if times >= 2}, seen


def test_a_peer_that_a_plan_with_drafts_waits_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the device, and the device for what the stage before sends."""
    watched: list[tuple[str, int | None]] = []
    awaited: set[tuple[str, int | None]] = set()
    watch, await_arrival = DeviceMarks.watch, StageRunner._await_arrival

    def note(self: DeviceMarks, step: int, operation: str, peer: int | None) -> None:
        watched[:] = [(operation, peer)]
        watch(self, step, operation, peer)

    class Arrival(LateEvent):
        def wait(self) -> None:
            awaited.update(watched)

    monkeypatch.setattr(DeviceMarks, "watch", note)
    monkeypatch.setattr(
        StageRunner, "_await_arrival", lambda self, plan, _arrived: await_arrival(self, plan, Arrival(0, 0.0))
    )
    monkeypatch.setattr("chaos.local_group.LocalStage", DeviceStage)
    assert run_group(drafting_workload(0, 3, Drafting.RANDOM), 0).seen["verifying row"] > 0
    assert awaited == {("receive hidden", 1)}


def learn_at_once(patch: pytest.MonkeyPatch) -> None:
    """The history of a draft model leaves out what the device has yet to say."""
    learn = Drafter._learn_sampled

    def only_what_is_known(self: Drafter, *, waits: bool) -> None:
        while self._sampled and not self._sampled[0][1].is_known:
            self._sampled.popleft()
        learn(self, waits=waits)

    patch.setattr(Drafter, "_learn_sampled", only_what_is_known)


def keep_drafts_of_a_lost_slot(patch: pytest.MonkeyPatch) -> None:
    """Drafts that are read late count as computed, whoever has the slot by then."""

    def keep(self: Drafter, row: DraftingRow, drafts: Sequence[int]) -> None:
        slot, end = row.planned.slot, row.next_position - 1
        for start, block in self._history._parts(slot, 0, end):
            self._history._filled[block] = min(BLOCK_TOKENS, end - start)
        self._history.compute(slot, row.next_position - len(drafts), drafts[:-1])

    patch.setattr(Drafter, "_keep", keep)


@pytest.mark.parametrize("break_rule", [*BROKEN_DRAFT_MODEL_RULES, learn_at_once, keep_drafts_of_a_lost_slot])
def test_a_broken_rule_of_a_draft_model_on_a_device_is_found(
    break_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_rule(monkeypatch)
    monkeypatch.setattr("chaos.local_group.LocalStage", DeviceStage)
    for seed in range(80):
        try:
            run_group(drafting_workload(seed, 1 + seed % 3, MODELS[seed % 2]), seed)
        except (AssertionError, BusProtocolError, WireError, DeadlockError):
            return
    raise AssertionError("not found")


VOCAB_SIZE = 700
RUNS_WITH_DRAFTS = 12


def plan_of(seq: int, rows: int, fills: tuple[SlotFill, ...] = ()) -> StepPlan:
    planned = tuple(
        PlanRow(slot, 1, 5 if fills else 5 + seq, 1, (3, 4, 5)[:1] if fills else (), need_sample=True)
        for slot in range(rows)
    )
    return StepPlan(seq, 0, fills, planned, rows, -1, feedback_posted=True, dummy=False)


SAMPLINGS = (
    RequestSampling(temperature=0.0, top_p=1.0, top_k=0, seed=1, choice=0),
    RequestSampling(temperature=0.8, top_p=0.9, top_k=20, seed=2, choice=0, num_top_logprobs=3),
    RequestSampling(temperature=0.9, top_p=1.0, top_k=0, seed=3, choice=0, frequency_penalty=1.5, num_top_logprobs=0),
    RequestSampling(
        temperature=1.0, top_p=1.0, top_k=0, seed=4, choice=0, logit_bias=((7, 9.0),), repetition_penalty=1.3
    ),
)


def test_penalties_and_logprobs_do_not_depend_on_when_the_host_learns_of_tokens() -> None:
    """Nobody asks for rows until the end; only what a request's own history needs is taken earlier."""
    on_cpu, deferred = SamplingState(), SamplingState(device=LateAccelerator(0))
    fills = tuple(SlotFill(slot, 1, sampling) for slot, sampling in enumerate(SAMPLINGS))
    expected, pending = [], []
    for seq in range(6):
        plan = plan_of(seq, len(SAMPLINGS), fills if seq == 0 else ())
        logits = torch.randn(len(SAMPLINGS), VOCAB_SIZE, generator=torch.Generator().manual_seed(seq))
        on_cpu.accept(plan)
        deferred.accept(plan)
        rows, feedback = on_cpu.sample(plan, logits.clone())
        late, late_feedback = deferred.sample(plan, logits.clone())
        assert late_feedback.tolist() == feedback.tolist()
        assert not late.is_known, "nothing is waited for"
        expected.append(rows.rows())
        pending.append(late)
    assert [rows.rows() for rows in pending] == expected


def test_marks_of_the_device_tile_the_hosts_time() -> None:
    """Three plans are queued at once; the state clock gets each state for as long as the device had it."""
    now = [1_000]
    clock = StateClock(lambda: now[0])
    heard: list[tuple[object, int]] = []
    clock._listener = lambda state, _operation, at: heard.append((state, at))
    watchdog = Watchdog(float("inf"), lambda: False, _never)
    accelerator = LateAccelerator(0)
    marks = DeviceMarks(accelerator.main, watchdog)
    in_flight = InFlight(accelerator, clock, watchdog, marks)
    for seq in range(3):
        marks.enter(BusyKind.DECODE, "forward")
        marks.enter(WaitReason.HOST, "")
        in_flight.add(plan_of(seq, 1), PendingRows.known(()))
    done: list[int] = []
    while in_flight:
        now[0] += 100
        done += [plan.seq for plan, *_ in in_flight.finished()]
    assert done == [0, 1, 2]
    assert [state for state, _ in heard] == [BusyKind.DECODE, WaitReason.HOST] * 3
    moments = [at for _, at in heard]
    assert moments == sorted(moments)
    assert moments[-1] <= now[0]
    now[0] += 50
    clock.enter(IDLE)
    spent, wall = clock.reading()
    assert sum(spent.values()) == pytest.approx(wall)


def test_the_watchdog_is_told_where_the_oldest_plan_hangs() -> None:
    clock = StateClock()
    watchdog = Watchdog(0.0, lambda: False, _never)
    accelerator = ImmediateAccelerator()
    never = LateEvent(1 << 30, 1.0)
    marks = DeviceMarks(accelerator.main, watchdog)
    in_flight = InFlight(accelerator, clock, watchdog, marks)
    marks.enter(WaitReason.RECV, "receive hidden")
    marks.watch(7, "receive hidden", 2)
    marks._marks += [mark._replace(event=never) for mark in marks._marks]
    in_flight.add(plan_of(7, 1), PendingRows.known(()))
    failure = watchdog.failure_at(float("inf"))
    assert failure is not None
    assert (failure.step, failure.operation, failure.peer) == (7, "receive hidden", 2)
    assert "plan 7: receive hidden (stage 2) took longer" in failure.detail
