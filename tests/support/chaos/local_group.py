"""A whole group in one process: real runners and scheduler over the local transport, in a seeded interleaving.

A stage may have several ranks, each a task of the interleaving: they divide experts, or share layers.

`run_group(workload, seed)` acts out a workload and checks at each step and at the end what must hold in every order. It
raises AssertionError, WireError or DeadlockError with what went wrong; the same arguments give the same run.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NoReturn
from unittest import mock

import torch

from chaos.interleaving import Interleaving
from chaos.local_engine import LocalEngine, stages_of_draft_model
from chaos.local_ranks import RankedHashModel, SharedHashModel, local_ranks
from chaos.local_transport import LocalNetwork, Posting
from chaos.local_workloads import Ask, Workload, expected_output
from chaos.watched_slot_tokens import WatchedSlotTokens
from oracles.hash_draft_model import HashDraftModel
from oracles.hash_model import VOCAB_SIZE, HashModel, reference_logits
from oracles.scripted_drafts import MODELS
from stageline_runtime.accelerator.cpu import HOST
from stageline_runtime.accelerator.protocol import ComputeDevice
from stageline_runtime.models.protocol import StageModel
from stageline_runtime.plan_bus.messages import Place, Shutdown, StepDone, StepPlan
from stageline_runtime.plan_bus.step_plan import plan_of_rank
from stageline_runtime.ranks.protocol import RankGroup
from stageline_runtime.ranks.stage_ranks import StageRanks
from stageline_runtime.stage.ranks.joining import JoinedRanks
from stageline_runtime.stage.step.drafter import Drafter, DraftStage
from stageline_runtime.stage.step.runner import StageRunner
from stageline_runtime.stage.telemetry.state_clock import StateClock
from stageline_runtime.stage.telemetry.watchdog import Watchdog
from stageline_runtime.termination import RuntimeFailure
from stageline_runtime.transport.protocol import FEEDBACK_WIDTH, Transport
from stageline_runtime.transport.rendezvous import RankLane


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model cut into stages, and what it must answer."""

    stages: Sequence[StageModel]
    """Of each stage all ranks, one after the other."""
    hidden_size: int
    dtype: torch.dtype
    expected: Callable[[Ask], tuple[int, ...]]
    logits_after: Callable[[list[int]], torch.Tensor] | None = None


def hash_model(workload: Workload, ends: Sequence[Sequence[RankGroup]]) -> LocalModel:
    """The model of plain integers, cheap enough for thousands of runs; `ends[stage]` are its ranks'."""
    make: Callable[[int, int | None, RankGroup], HashModel]
    make = SharedHashModel if workload.shares_layers else RankedHashModel
    return LocalModel(
        stages=[make(stage, workload.num_blocks, end) for stage, of_stage in enumerate(ends) for end in of_stage],
        hidden_size=workload.num_ranks if workload.shares_layers else 1,
        dtype=torch.int64,
        expected=lambda ask: _expected_hashes(ask, workload.num_stages),
        logits_after=lambda context: torch.tensor(reference_logits(context, workload.num_stages)),
    )


@cache
def _expected_hashes(ask: Ask, num_stages: int) -> tuple[int, ...]:
    return expected_output(ask, lambda context: torch.tensor(reference_logits(context, num_stages)))


class LocalStage:
    """The process of a stage or of a rank of it, without a process: takes what has come, runs one plan, and so on."""

    def __init__(
        self,
        place: Place,
        ranks: RankGroup,
        model: LocalModel,
        engine: LocalEngine,
        network: LocalNetwork,
        interleaving: Interleaving,
    ) -> None:
        """`ranks`: what it exchanges with the others of its stage; `network` is that of the ranks of its number."""
        workload = engine.workload
        stage = place.stage
        self.ran: list[int] = []
        self.place = place
        self._engine = engine
        self._interleaving = interleaving
        self._plans: deque[StepPlan] = deque()
        of_stage = StageRanks(tensor=ranks) if workload.shares_layers else StageRanks(experts=ranks)
        self._joined = JoinedRanks(of_stage)
        # Never started: what hangs is a deadlock here.
        self._watchdog = Watchdog(float("inf"), lambda: False, _never)
        with mock.patch("stageline_runtime.stage.step.runner.SlotTokens", partial(WatchedSlotTokens, seen=engine.seen)):
            self._runner = StageRunner(
                model.stages[stage * workload.num_ranks + place.rank],
                self._transport(model, network),
                StateClock(lambda: interleaving.turns),
                self._watchdog,
                stage=stage,
                stage_count=workload.num_stages,
                num_slots=workload.num_slots,
                hidden_size=model.hidden_size,
                dtype=model.dtype,
                drafter=drafter_of(workload) if stage == workload.num_stages - 1 and of_stage.samples else None,
                ranks=of_stage.tensor,
                vocab_size=VOCAB_SIZE,
            )

    def _transport(self, model: LocalModel, network: LocalNetwork) -> Transport:
        """The rank's lane."""
        of_stage, num_stages = self._joined.ranks.tensor, self._engine.workload.num_stages
        width = model.hidden_size // of_stage.size
        lane = network.transport(self.place.stage, num_stages, hidden_size=width, dtype=model.dtype)
        return lane if of_stage.size == 1 or num_stages == 1 else RankLane(lane, of_stage)

    def live(self) -> None:
        """Serve until told to shut down."""
        mailbox = self._engine.mailboxes[self.place]
        while True:
            self._interleaving.wait_until(lambda: bool(mailbox or self._plans), "a plan")
            while mailbox:
                message = mailbox.popleft()
                if isinstance(message, Shutdown):
                    assert not self._plans, f"{self.place} was shut down with plans to run"
                    return
                self._runner.accept(self._part(message))
                self._plans.append(message)
            if not self._plans:
                continue
            plan = self._plans.popleft()
            self._joined.meet(plan, self._watchdog)
            self._run(self._part(plan))

    def _run(self, part: StepPlan) -> None:
        sampled = self._runner.run(part)
        self.ran.append(part.seq)
        if self._runner.tells:
            self._engine.done.append(StepDone(part.seq, sampled.rows(), self._runner.take_reports(part)))
        drafts = self._runner.draft(part)
        if drafts is not None:
            self._engine.done.append(drafts.drafted())

    def _part(self, plan: StepPlan) -> StepPlan:
        return plan_of_rank(plan, self.place.rank, self._joined.ranks.experts.size)


def drafter_of(workload: Workload, device: ComputeDevice = HOST) -> Drafter | None:
    """The last stage's, where the workload has a draft model."""
    if workload.drafting not in MODELS:
        return None
    stage = DraftStage(
        model=HashDraftModel(stages_of_draft_model(workload), workload.num_blocks),
        vocab_size=VOCAB_SIZE,
        context_tokens=workload.draft_context_tokens,
    )
    return Drafter(
        stage,
        num_slots=workload.num_slots,
        max_step_tokens=workload.max_step_tokens,
        vocab_size=VOCAB_SIZE,
        device=device,
    )


def _never(failure: RuntimeFailure) -> NoReturn:
    raise failure


def run_group(
    workload: Workload, seed: int, model: LocalModel | None = None, engine_type: type[LocalEngine] = LocalEngine
) -> LocalEngine:
    """Run `workload` to its end and check it; returns the engine for what it has seen."""
    interleaving = Interleaving(seed)
    exchanges, ends = zip(
        *(local_ranks(interleaving, workload.num_ranks) for _ in range(workload.num_stages)), strict=True
    )
    model = model or hash_model(workload, ends)
    engine = engine_type(workload, model.expected, interleaving)
    engine.logits_after = model.logits_after
    networks = [LocalNetwork(interleaving) for _ in range(workload.num_ranks)]
    stages = [
        LocalStage(place, ends[place.stage][place.rank], model, engine, networks[place.rank], interleaving)
        for place in engine.mailboxes
    ]
    for stage in stages:
        interleaving.add_task(stage.place.words(workload.num_ranks), stage.live)
    try:
        interleaving.run()
    finally:
        engine.close()
    check_end(engine, networks, stages, model.hidden_size // (workload.num_ranks if workload.shares_layers else 1))
    assert all(len(set(each.counts)) == 1 for each in exchanges), [each.counts for each in exchanges]
    return engine


def check_end(
    engine: LocalEngine, networks: Sequence[LocalNetwork], stages: Sequence[LocalStage], hidden_size: int
) -> None:
    """Nothing is left over: no request, token, slot, plan or receive. `hidden_size` is that of a lane."""
    assert not engine.live, f"unfinished: {engine.live}"
    assert engine.scheduler.ledger.held_slots == engine.scheduler.ledger.held_blocks == 0
    assert engine.scheduler.num_plans_in_flight == 0
    for stage in stages:
        assert stage.ran == list(range(len(engine.plans))), stage.ran
    parts = [engine.parts(plan) for plan in engine.plans]
    for rank, network in enumerate(networks):
        assert not network.outstanding(), network.outstanding()
        expected = named_receives([each[rank % len(each)] for each in parts], engine.workload.num_stages, hidden_size)
        actual = sorted(network.postings, key=_posting_key)
        assert actual == sorted(expected, key=_posting_key), (actual, expected)


def named_receives(plans: Sequence[StepPlan], num_stages: int, hidden_size: int) -> list[Posting]:
    """The receives that plans name, and no others may be posted."""
    if num_stages == 1:
        return []
    hidden = [
        Posting(stage=stage, channel="hidden", seq=plan.seq, shape=(plan.padded_tokens, hidden_size))
        for plan in plans
        for stage in range(1, num_stages)
    ]
    feedback = [
        Posting(stage=0, channel="feedback", seq=plan.seq, shape=(len(plan.sampled_rows), FEEDBACK_WIDTH))
        for plan in plans
        if plan.feedback_posted
    ]
    return hidden + feedback


def _posting_key(posting: Posting) -> tuple[str, int, int]:
    return posting.channel, posting.stage, posting.seq
