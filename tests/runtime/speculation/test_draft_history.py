"""Whatever comes over a slot, what counts as computed was computed from the ids that stand there."""

from hypothesis import given
from hypothesis import strategies as st

from stageline_runtime.speculation.draft_history import DraftHistory

SLOTS = 3
ID = st.integers(0, 2)
"""Few, so that a wrong draft is often followed by the same tokens."""


class Follower:
    """A draft model's cache beside the history: the ids that its keys were made from."""

    def __init__(self) -> None:
        self.history = DraftHistory(SLOTS)
        self.keys: list[list[int]] = [[] for _ in range(SLOTS)]
        self.said: list[list[int]] = [[] for _ in range(SLOTS)]

    def fill(self, slot: int, source: int | None, cached: int) -> None:
        kept = self.history.fill(slot, 1, source, cached)
        origin = slot if source is None else source
        assert kept <= min(cached, len(self.keys[origin]))
        self.keys[slot] = self.keys[origin][:kept]
        self.said[slot] = self.said[origin][:cached]

    def take(self, slot: int, ids: list[int]) -> None:
        self.history.take(slot, len(self.said[slot]), ids)
        self.said[slot] += ids

    def draft(self, slot: int, count: int, drafts: list[int], room: int) -> None:
        position, ids = self.history.pending(slot)
        ids = ids[:room]
        self.compute(slot, position, ids)
        end = position + len(ids)
        assert self.keys[slot][:end] == self.said[slot][:end]
        if end < len(self.said[slot]):
            return
        for index in range(count):
            self.compute(slot, end + index, [drafts[index]])

    def compute(self, slot: int, position: int, ids: list[int]) -> None:
        self.history.compute(slot, position, ids)
        self.keys[slot][position:] = ids


@given(st.data())
def test_keys_are_those_of_the_ids(data: st.DataObject) -> None:
    follower = Follower()
    for _ in range(data.draw(st.integers(1, 30))):
        slot = data.draw(st.integers(0, SLOTS - 1))
        match data.draw(st.sampled_from(["fill", "take", "draft", "trim"])):
            case "fill":
                source = data.draw(st.sampled_from([None, *(each for each in range(SLOTS) if each != slot)]))
                most = len(follower.said[slot if source is None else source])
                follower.fill(slot, source, data.draw(st.integers(0, most)))
            case "take":
                follower.take(slot, data.draw(st.lists(ID, min_size=1, max_size=4)))
            case "draft" if follower.said[slot]:
                drafts = data.draw(st.lists(ID, min_size=3, max_size=3))
                follower.draft(slot, data.draw(st.integers(0, 3)), drafts, data.draw(st.integers(1, 6)))
            case "trim":
                kept = data.draw(st.integers(0, len(follower.said[slot])))
                follower.history.trim(slot, kept)
                del follower.keys[slot][kept:]


def test_what_is_missed_is_computed_once_and_the_newest_token_always() -> None:
    history = DraftHistory(1)
    history.fill(0, 4, None, 0)
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


def test_a_slot_that_begins_with_anothers_tokens_takes_over_what_was_computed() -> None:
    history = DraftHistory(2)
    history.fill(0, 1, None, 0)
    history.take(0, 0, [1, 2, 3, 4, 5])
    history.compute(0, 0, [1, 2, 3])
    assert history.fill(1, 1, 0, 4) == 3
    assert history.pending(1) == (3, [4])
    assert history.fill(0, 2, None, 2) == 2
    assert history.pending(0) == (1, [2])
