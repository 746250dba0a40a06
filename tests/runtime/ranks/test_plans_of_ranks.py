"""Where requests belong to one rank each, every rank's part of a plan follows from the plan, and no row is lost."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.engine.group.rank_results import RankResults, ReadyCounts
from stageline_runtime.engine.scheduling.slot_ledger import SlotLedger
from stageline_runtime.plan_bus.messages import (
    Drafted,
    DraftedRow,
    RequestSampling,
    SampledRow,
    SlotBlocks,
    SlotFill,
    StepDone,
)
from stageline_runtime.plan_bus.step_plan import (
    BLOCK_TOKENS,
    PlanRow,
    StepPlan,
    padded_part,
    padded_size,
    plan_of_rank,
    rank_of_slot,
)


def row_of(slot: int, num_tokens: int = 1, *, samples: bool = True, wants_drafts: bool = False) -> PlanRow:
    ids = tuple(range(num_tokens)) if num_tokens > 1 else ()
    return PlanRow(slot, 1, 0, num_tokens, ids, samples, 0, wants_drafts)


def plan_with(*rows: PlanRow, ranks: int = 2, posted: bool = True) -> StepPlan:
    return StepPlan(7, 0, (), rows, padded_part(rows, ranks), 5, posted, False)


ROWS = st.lists(
    st.builds(row_of, st.integers(0, 11), st.integers(1, 9), samples=st.booleans(), wants_drafts=st.booleans()),
    unique_by=lambda row: row.slot,
    min_size=1,
)


@given(rows=ROWS, ranks=st.integers(1, 4), posted=st.booleans())
def test_parts_divide_a_plan_and_have_its_shape(rows: list[PlanRow], ranks: int, posted: bool) -> None:
    posted = posted and any(row.need_sample for row in rows)
    plan = plan_with(*rows, ranks=ranks, posted=posted)
    parts = [plan_of_rank(plan, rank, ranks) for rank in range(ranks)]
    assert sorted((row for part in parts for row in part.rows), key=lambda row: row.slot) == sorted(
        rows, key=lambda row: row.slot
    )
    for rank, part in enumerate(parts):
        assert {rank_of_slot(row.slot, ranks) for row in part.rows} <= {rank}
        assert (part.seq, part.padded_tokens, part.feedback_through) == (7, plan.padded_tokens, 5)
        assert part.num_tokens <= part.padded_tokens
        assert part.dummy == (not part.rows), "a rank without rows runs them all the same"
        assert not part.is_heartbeat
        assert part.feedback_posted == (posted and bool(part.sampled_rows)), "both ends of a lane agree"
    largest = max(part.num_tokens for part in parts)
    assert plan.padded_tokens == padded_size(largest)


def test_what_belongs_to_a_slot_goes_with_it() -> None:
    fills = tuple(SlotFill(slot, 1, RequestSampling()) for slot in range(4))
    tables = (SlotBlocks(1, 0, (4,)), SlotBlocks(2, 1, (5,)))
    plan = msgspec.structs.replace(plan_with(row_of(0, wants_drafts=True)), fills=fills, tables=tables, draft_steps=3)
    first, other = (plan_of_rank(plan, rank, 2) for rank in (0, 1))
    assert ([fill.slot for fill in first.fills], [fill.slot for fill in other.fills]) == ([0, 2], [1, 3])
    assert (first.tables, other.tables) == ((tables[1],), (tables[0],))
    assert (first.draft_steps, other.draft_steps) == (3, 0)
    assert (first.dummy, other.dummy) == (False, True)


def test_heartbeats_and_warm_ups_are_everybodys() -> None:
    heartbeat = StepPlan(7, 0, (), (), 1, 5, False, False)
    warm_up = msgspec.structs.replace(heartbeat, dummy=True, padded_tokens=8, draft_steps=2)
    for rank in (0, 1):
        assert plan_of_rank(heartbeat, rank, 2) == heartbeat
        assert plan_of_rank(warm_up, rank, 2) == warm_up


def test_a_plan_is_done_when_every_rank_has_said_so() -> None:
    passed: list[StepDone | Drafted] = []
    results = RankResults(2, passed.append, passed.append)
    rows = [SampledRow(slot, 1, 40 + slot) for slot in range(3)]
    results.step_done(StepDone(0, (rows[0],)))
    results.step_done(StepDone(1, ()))
    assert passed == [], "the other rank has answered neither plan"
    results.step_done(StepDone(0, (rows[1], rows[2])))
    assert passed == [StepDone(0, tuple(rows))]
    results.step_done(StepDone(1, ()))
    assert passed[1:] == [StepDone(1, ())]
    counts = ReadyCounts(2)
    assert [counts.is_last(number) for number in (1, 2, 1, 2, 1)] == [False, False, True, True, False]


def test_drafts_are_passed_on_once_all_ranks_have_said_what_was_sampled() -> None:
    passed: list[StepDone | Drafted] = []
    results = RankResults(3, passed.append, passed.append)
    drafted = [Drafted(0, (DraftedRow(rank, 1, 9, (5, 6)),), 0.1) for rank in range(3)]
    said = [StepDone(0, (SampledRow(rank, 1, 40 + rank),)) for rank in range(3)]
    results.step_done(said[2])
    results.drafted(drafted[2])
    results.step_done(said[0])
    results.step_done(StepDone(1, ()))
    results.drafted(drafted[0])
    assert passed == []
    results.step_done(said[1])
    assert passed == [StepDone(0, (*said[2].rows, *said[0].rows, *said[1].rows)), drafted[2], drafted[0]]
    results.drafted(drafted[1])
    assert passed[3:] == [drafted[1]]


def test_requests_are_spread_over_ranks_and_begin_with_what_their_own_holds() -> None:
    ledger = SlotLedger(2, 8, 64, prefix_cache=True, num_ranks=2)
    prompt = tuple(range(40))
    taken = [ledger.take(prompt, ranks=(0, 1))[0] for _ in range(4)]
    assert [rank_of_slot(slot, 2) for slot in taken] == [0, 1, 0, 1], taken
    ledger.note_full(taken[0], [prompt[:BLOCK_TOKENS], prompt[BLOCK_TOKENS : 2 * BLOCK_TOKENS]])
    assert ledger.share_more(taken[2], prompt) == 2 * BLOCK_TOKENS
    assert ledger.share_more(taken[3], prompt) == 0, "another rank's memory"
    ledger.note_full(taken[1], [prompt[:BLOCK_TOKENS]])
    assert ledger.share_more(taken[3], prompt) == BLOCK_TOKENS, "as much as its own rank holds"
    assert rank_of_slot(ledger.take(prompt, ranks=(0, 1))[0], 2) == 0, "where most of it is, of equally busy ones"
    assert rank_of_slot(ledger.take(prompt, ranks=(0, 1))[0], 2) == 1, "a step is as long as its fullest rank's part"
