"""Whatever comes over a slot, what counts as computed was computed from the ids that stand there."""

from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.plan_bus.messages import RequestSampling, SlotBlocks, SlotFill
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS
from stageline_runtime.speculation.draft_history import DraftHistory

SLOTS, WIDTH = 3, 3
ID = st.integers(0, 2)
"""Few, so that a wrong draft is often followed by the same tokens."""


def filled(slot: int, generation: int, cached: tuple[int, ...]) -> SlotFill:
    return SlotFill(slot, generation, RequestSampling(), len(cached), cached)


class Follower:
    """A draft model's cache beside the history: by block and place, the ids that its key was made from."""

    def __init__(self) -> None:
        self.history = DraftHistory(SLOTS)
        self.keys: dict[tuple[int, int], tuple[int, ...]] = {}
        self.tables: list[list[int]] = [[] for _ in range(SLOTS)]
        self.said: list[list[int]] = [[] for _ in range(SLOTS)]
        self.newest_block = -1

    def change(self, slot: int, start: int, blocks: list[int], *, are_new: bool) -> None:
        self.tables[slot][start:] = blocks
        self.history.change(SlotBlocks(slot, start, tuple(blocks), are_new))

    def extend(self, slot: int) -> None:
        missing = range(len(self.tables[slot]), WIDTH)
        blocks = [self.newest_block + count for count, _ in enumerate(missing, start=1)]
        self.newest_block += len(blocks)
        self.change(slot, len(self.tables[slot]), blocks, are_new=True)

    def fill(self, slot: int, source: int | None) -> None:
        """With the whole blocks of another slot's tokens, or none."""
        shared = [] if source is None else self.tables[source][: len(self.said[source]) // BLOCK_TOKENS]
        said = [] if source is None else self.said[source][: len(shared) * BLOCK_TOKENS]
        self.change(slot, 0, [], are_new=False)
        self.change(slot, 0, shared, are_new=False)
        self.extend(slot)
        self.history.fill(filled(slot, 1, tuple(said)))
        self.said[slot] = list(said)

    def take(self, slot: int, ids: list[int]) -> None:
        ids = ids[: WIDTH * BLOCK_TOKENS - len(self.said[slot])]
        self.history.take(slot, len(self.said[slot]), ids)
        self.said[slot] += ids

    def draft(self, slot: int, drafts: list[int], room: int) -> None:
        position, ids = self.history.pending(slot)
        ids = ids[:room]
        self.compute(slot, position, ids)
        end = position + len(ids)
        whole = self.said[slot][:end]
        places = [(self.tables[slot][at // BLOCK_TOKENS], at % BLOCK_TOKENS) for at in range(end)]
        assert [self.keys[place] for place in places] == [tuple(whole[: at + 1]) for at in range(end)]
        if end < len(self.said[slot]):
            return
        for index, draft in enumerate(drafts[: WIDTH * BLOCK_TOKENS - end]):
            self.compute(slot, end + index, [draft])

    def compute(self, slot: int, position: int, ids: list[int]) -> None:
        """Each key is made from the keys that lie before it."""
        self.history.compute(slot, position, ids)
        for at, token in enumerate(ids, start=position):
            before = self.keys[self.tables[slot][(at - 1) // BLOCK_TOKENS], (at - 1) % BLOCK_TOKENS] if at else ()
            self.keys[self.tables[slot][at // BLOCK_TOKENS], at % BLOCK_TOKENS] = (*before, token)


@given(st.data())
def test_keys_are_those_of_the_ids(data: st.DataObject) -> None:
    follower = Follower()
    for slot in range(SLOTS):
        follower.fill(slot, None)
    for _ in range(data.draw(st.integers(1, 30))):
        slot = data.draw(st.integers(0, SLOTS - 1))
        match data.draw(st.sampled_from(["fill", "take", "draft"])):
            case "fill":
                source = data.draw(st.sampled_from([None, *(each for each in range(SLOTS) if each != slot)]))
                follower.fill(slot, source)
            case "take":
                follower.take(slot, data.draw(st.lists(ID, min_size=1, max_size=20)))
            case "draft" if follower.said[slot]:
                follower.draft(slot, data.draw(st.lists(ID, max_size=3)), data.draw(st.integers(1, 40)))


def test_what_is_missed_is_computed_once_and_the_newest_token_always() -> None:
    history = DraftHistory(1)
    history.change(SlotBlocks(0, 0, (0,), are_new=True))
    history.fill(filled(0, 4, ()))
    assert history.is_current(0, 4)
    assert not history.is_current(0, 3)
    history.take(0, 0, [7, 8, 9])
    assert history.pending(0) == (0, [7, 8, 9])
    history.compute(0, 0, [7, 8, 9])
    history.compute(0, 3, [5])
    history.compute(0, 4, [6])
    history.take(0, 3, [5, 1])
    assert history.pending(0) == (4, [1]), "the draft 6 came otherwise"
    history.compute(0, 4, [1])
    history.take(0, 5, [2])
    assert history.pending(0) == (5, [2])


def test_who_shares_a_beginning_has_what_was_computed_of_it() -> None:
    history = DraftHistory(2)
    prompt = tuple(range(20))
    history.change(SlotBlocks(0, 0, (0, 1), are_new=True))
    history.fill(filled(0, 1, ()))
    history.take(0, 0, prompt)
    history.compute(0, 0, prompt[:12])
    history.change(SlotBlocks(1, 0, (0,)))
    history.change(SlotBlocks(1, 1, (2,), are_new=True))
    history.fill(filled(1, 1, prompt[:16]))
    history.take(1, 16, [5])
    assert history.pending(1) == (12, [12, 13, 14, 15, 5])
    history.compute(1, 12, [12, 13, 14, 15, 5])
    assert history.pending(0) == (16, [16, 17, 18, 19]), "what one computes is there for the other"
