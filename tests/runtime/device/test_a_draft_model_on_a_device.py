"""A draft model that runs on a device says what it says on the CPU, and no step of it waits for the one before."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oracles.paged_store import own_blocks
from oracles.simulated_accelerator import ImmediateAccelerator, LateAccelerator
from oracles.tiny_models import VOCAB_SIZE, write_tiny_llama
from stageline_api.runtime_config import LayerRange
from stageline_runtime.accelerator.protocol import Accelerator
from stageline_runtime.model_facts.model_config import read_model_config
from stageline_runtime.models.decoder import DecoderStage
from stageline_runtime.models.layers.attention import PlainAttention
from stageline_runtime.models.protocol import CaptureSizes, GraphsUnavailableError, StageShape
from stageline_runtime.plan_bus.messages import (
    DraftedRow,
    GraphMode,
    PlanRow,
    RequestSampling,
    SampledRow,
    SlotBlocks,
    SlotFill,
    StepPlan,
)
from stageline_runtime.plan_bus.step_plan import decode_sizes, padded_size
from stageline_runtime.sampling import device_sampler
from stageline_runtime.stage.capturing import capture_draft
from stageline_runtime.stage.load_draft import LoadedDraft, load_draft
from stageline_runtime.stage.step.drafter import Drafter, DraftStage
from stageline_runtime.stage.step.in_flight import DeviceMarks, InFlight
from stageline_runtime.stage.step.pending_rows import PendingRows
from stageline_runtime.stage.step.sampling_state import slot_sampling
from stageline_runtime.stage.telemetry.state_clock import BusyKind, StateClock, WaitReason
from stageline_runtime.stage.telemetry.watchdog import Watchdog

SAMPLINGS = (
    RequestSampling(temperature=0.0),
    RequestSampling(temperature=0.9, top_p=0.8, seed=5),
    RequestSampling(temperature=0.7, seed=6, repetition_penalty=1.3, logit_bias=((9, 2.0),)),
)
PROMPTS = ((3, 1, 4, 1, 5), (9, 2, 6), tuple(range(20, 60)))
"""The last one is longer than what is caught up with at once."""
SHAPE = StageShape(
    layers=LayerRange(first=0, last=0),
    is_first=False,
    is_last=True,
    dtype=torch.float32,
    num_cohorts=1,
    num_slots=len(PROMPTS),
    slot_tokens=128,
    max_step_tokens=32,
)


def plan_of(seq: int, rows: tuple[PlanRow, ...], fills: tuple[SlotFill, ...] = (), draft_steps: int = 0) -> StepPlan:
    padded = padded_size(sum(row.num_tokens for row in rows))
    tables = own_blocks(SHAPE.num_slots, SHAPE.slot_tokens) if seq == 0 else ()
    return StepPlan(
        seq, 0, fills, rows, padded, -1, feedback_posted=False, dummy=False, tables=tables, draft_steps=draft_steps
    )


def load(model_dir: Path, accelerator: Accelerator | None) -> LoadedDraft:
    config = read_model_config(model_dir)
    draft = load_draft(
        model_dir,
        config,
        config,
        SHAPE,
        lambda _loaded, _total: None,
        max_step_tokens=32,
        accelerator=accelerator,
        attention=PlainAttention,
    )
    draft.make_cache(40)
    return draft


def loaded(model_dir: Path, accelerator: Accelerator | None, graphs: GraphMode) -> Drafter:
    draft = load(model_dir, accelerator)
    sizes = CaptureSizes(decode=decode_sizes(SHAPE.num_slots), step=(padded_size(32),))
    captured, report = draft.capture(graphs, sizes, lambda _message: None)
    assert (report.graphs > 0) == (captured is not GraphMode.OFF) == (graphs is not GraphMode.OFF)
    return draft.drafter(captured)


def conversation(drafting: Drafter) -> list[tuple[DraftedRow, ...]]:
    """Rounds of all three requests: of each round's drafts the first holds, and another token follows."""
    slots = [slot_sampling(1, sampling, None) for sampling in SAMPLINGS]
    for slot, prompt in zip(slots, PROMPTS, strict=True):
        slot.take_inputs(0, prompt)
    known = [list(prompt) for prompt in PROMPTS]
    rows = tuple(
        PlanRow(slot, 1, 0, len(prompt), prompt, need_sample=True, wants_drafts=True)
        for slot, prompt in enumerate(PROMPTS)
    )
    fills = tuple(SlotFill(slot, 1, sampling) for slot, sampling in enumerate(SAMPLINGS))
    said: list[tuple[DraftedRow, ...]] = []
    for seq in range(6):
        plan = plan_of(seq, rows, fills if seq == 0 else (), draft_steps=5)
        drafting.accept(plan)
        sampled = []
        for row in rows:
            held, new = row.token_ids[1 : 1 + min(row.num_drafts, 1)], (37 * seq + row.slot) % VOCAB_SIZE
            known[row.slot] += [*held, new]
            count = len(held) + 1
            sampled.append(SampledRow(row.slot, 1, new, num_sampled=count))
        drafting.take(plan, PendingRows.known(tuple(sampled)))
        drafted = drafting.draft(plan, lambda row: slots[row.slot])
        drafted.copy_out()
        said.append(drafted.drafted().rows)
        rows = tuple(
            PlanRow(
                each.slot,
                1,
                len(known[each.slot]) - 1,
                1 + len(each.token_ids),
                (known[each.slot][-1], *each.token_ids),
                need_sample=True,
                num_drafts=len(each.token_ids),
                wants_drafts=True,
            )
            for each in said[-1]
        )
    return said


@pytest.mark.parametrize("graphs", [GraphMode.OFF, GraphMode.FULL])
def test_it_drafts_what_it_drafts_on_the_cpu(graphs: GraphMode, tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "model")
    expected = conversation(loaded(model_dir, None, GraphMode.OFF))
    assert [len(row.token_ids) for row in expected[0]] == [5, 5, 0], "the long prompt takes a second step"
    assert all(len(row.token_ids) == 5 for said in expected[2:] for row in said)
    assert conversation(loaded(model_dir, LateAccelerator(0), graphs)) == expected


def test_one_that_can_not_be_captured_says_so_and_runs_eagerly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise GraphsUnavailableError("the model is a mixture of experts")

    monkeypatch.setattr(DecoderStage, "capture_graphs", refuse)
    draft = load(write_tiny_llama(tmp_path / "model"), ImmediateAccelerator())
    given: Any = SimpleNamespace(graphs=GraphMode.FULL, num_cohorts=1, num_slots=SHAPE.num_slots, max_step_tokens=32)
    said = capture_draft(draft, given, progress=given)
    assert said == (GraphMode.OFF, "; the draft model runs eagerly: the model is a mixture of experts")


class Successor:
    """A model for which the token after `n` is `n + 1`; hidden rows are the ids themselves."""

    def step_batch(self, plan: StepPlan) -> None:
        """Nothing is attended to."""

    def reserve_cache(self, num_blocks: int) -> None:
        """Nothing is kept."""

    def change_tables(self, changes: Sequence[SlotBlocks]) -> None:
        """Nothing is kept."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids[:, None]

    def layers(self, hidden: torch.Tensor, batch: None) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        return hidden

    def head(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((hidden_rows[:, 0] + 1) % 64, 64).to(torch.float32)


def successors(accelerator: Accelerator) -> Drafter:
    stage = DraftStage(model=Successor(), vocab_size=64, context_tokens=64)
    return Drafter(stage, num_slots=SHAPE.num_slots, max_step_tokens=16, vocab_size=64, device=accelerator)


def first_plan(draft_steps: int) -> StepPlan:
    row = PlanRow(0, 1, 0, 3, (5, 6, 7), need_sample=True, wants_drafts=True)
    return plan_of(0, (row,), (SlotFill(0, 1, SAMPLINGS[0]),), draft_steps)


class ReadError(Exception):
    """The host has read what the device computes."""


def test_no_step_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting, plan = successors(LateAccelerator(0)), first_plan(6)
    drafting.accept(plan)
    drafting.take(plan, PendingRows.known((SampledRow(0, 1, 20),)))

    def refuse(*_: object) -> None:
        raise ReadError

    with monkeypatch.context() as patch:
        # On the CPU in disguise draws read; on a device they are kernels' (test_device_kernels_draw_the_cpus_tokens).
        patch.setattr(device_sampler, "sample", lambda logits, _rows, _positions: logits.argmax(dim=-1))
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse)
        with pytest.raises(ReadError):
            torch.zeros(1).tolist()
        drafts = drafting.draft(plan, lambda _row: None)
        drafts.copy_out()
    assert drafts.drafted().rows == (DraftedRow(0, 1, 4, (21, 22, 23, 24, 25, 26)),)


def test_tokens_that_come_late_are_waited_for_once_drafts_are_wanted() -> None:
    """Plans without drafts go by, and nobody reads what they sampled until then."""
    device = ImmediateAccelerator()
    drafting = successors(device)
    late = [
        PendingRows(device, (torch.tensor(token),), lambda read: (SampledRow(0, 1, int(read[0])),))
        for token in (30, 40, 50)
    ]
    for seq, pending in enumerate(late):
        row = PlanRow(0, 1, 0, 3, (5, 6, 7), need_sample=True) if seq == 0 else PlanRow(0, 1, 2 + seq, 1, (), True)
        plan = plan_of(seq, (row,), (SlotFill(0, 1, SAMPLINGS[0]),) if seq == 0 else ())
        drafting.accept(plan)
        drafting.take(plan, pending)
    assert [pending.is_known for pending in late] == [False] * 3
    wanting = plan_of(3, (PlanRow(0, 1, 5, 1, (), need_sample=True, wants_drafts=True),), draft_steps=2)
    drafting.accept(wanting)
    drafting.take(wanting, PendingRows.known((SampledRow(0, 1, 60),)))
    assert drafting.draft(wanting, lambda _row: None).drafted().rows == (DraftedRow(0, 1, 7, (61, 62)),)


def test_drafting_is_a_state_of_its_own_behind_its_plan() -> None:
    """The plan is told as soon as it is done; the device's clock says how long it drafted after it."""
    now = [1_000]
    clock = StateClock(lambda: now[0])
    heard: list[object] = []
    clock._listener = lambda state, _operation, _at: heard.append(state)
    watchdog = Watchdog(float("inf"), lambda: False, lambda failure: pytest.fail(str(failure)))
    accelerator = LateAccelerator(0)
    marks = DeviceMarks(accelerator.main, watchdog)
    in_flight = InFlight(accelerator, clock, watchdog, marks)
    drafting, plan = successors(accelerator), first_plan(2)
    drafting.accept(plan)
    marks.enter(BusyKind.PREFILL, "forward")
    marks.enter(WaitReason.HOST, "")
    sampled = PendingRows.known((SampledRow(0, 1, 20),))
    in_flight.add(plan, sampled)
    drafting.take(plan, sampled)
    marks.enter(BusyKind.DRAFT, "draft")
    drafts = drafting.draft(plan, lambda _row: None)
    marks.enter(WaitReason.HOST, "")
    in_flight.add_drafts(plan, sampled, drafts)
    following = plan_of(1, (PlanRow(1, 1, 0, 1, (3,), need_sample=False),))
    marks.enter(BusyKind.DECODE, "forward")
    marks.enter(WaitReason.HOST, "")
    in_flight.add(following, PendingRows.known(()))
    done = []
    while in_flight:
        now[0] += 100
        done += list(in_flight.finished())
    assert [(each.plan.seq, each.drafted and each.drafted.rows[0].token_ids) for each in done] == [
        (0, None),
        (0, (21, 22)),
        (1, None),
    ]
    assert heard == [
        BusyKind.PREFILL,
        WaitReason.HOST,
        BusyKind.DRAFT,
        WaitReason.HOST,
        BusyKind.DECODE,
        WaitReason.HOST,
    ]
