"""The choice of a group and what it costs, as pure functions."""

from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes.gateway_harness import group
from stageline_api.endpoints import GroupEndpoint
from stageline_api.engine_http import ChatMessage, ChatPrompt, GenerateRequest, SamplingParams, TextPrompt, TokenPrompt
from stageline_gateway.groups.routing import (
    EXPECTED_ANSWER_TOKENS,
    LOAD_FACTOR,
    MOST_SLACK,
    PREFIX_CHARACTERS,
    PREFIX_TOKENS,
    SLACK_OF_SLOTS,
    EngineAccount,
    EngineAccounts,
    Ledger,
    Load,
    Wish,
    affinity_key,
    choose,
    expected_tokens,
    identity,
    ranked,
)

LOADS = st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 5)), min_size=1, max_size=6)
KEYS = st.text(min_size=1, max_size=8)


def groups_of(count: int) -> list[GroupEndpoint]:
    """Groups 0 to `count`, each at an address of its own."""
    return [group(f"http://{index}", index) for index in range(count)]


def loads_of(groups: list[GroupEndpoint], rows: list[tuple[int, int]]) -> dict[str, Load]:
    """Outstanding tokens and requests started, in the groups' order."""
    return {identity(one): Load(tokens, 1, started) for one, (tokens, started) in zip(groups, rows, strict=True)}


@given(LOADS)
def test_without_affinity_the_least_loaded_is_chosen(rows: list[tuple[int, int]]) -> None:
    groups = groups_of(len(rows))
    chosen = choose(groups, loads_of(groups, rows))
    assert chosen is not None
    assert rows[chosen.group] == min(rows)


@dataclass(frozen=True)
class Row:
    """A group as it stands."""

    own: int
    from_others: int
    slots: int
    held: int
    """How many of the prompt's three beginnings."""

    @property
    def requests(self) -> int:
        return self.own + self.from_others


ROWS = st.lists(
    st.builds(Row, st.integers(0, 40), st.integers(0, 40), st.sampled_from([1, 8, 64, 256]), st.integers(0, 3)),
    min_size=2,
    max_size=6,
)
PREFIXES = (("a", 0.25), ("b", 0.5), ("c", 1.0))


def chosen_of(rows: list[Row], wish: Wish) -> Row:
    groups = groups_of(len(rows))
    keyed = list(zip(map(identity, groups), rows, strict=True))
    loads = {key: Load(10 * row.own, row.own, row.own) for key, row in keyed}
    accounts = {
        key: EngineAccount(row.slots, row.from_others, frozenset(name for name, _ in PREFIXES[: row.held]))
        for key, row in keyed
    }
    chosen = choose(groups, loads, wish, accounts)
    assert chosen is not None
    return rows[chosen.group]


@given(ROWS, KEYS, st.booleans())
def test_a_preferred_group_is_never_crowded_nor_full_while_another_is_not(
    rows: list[Row], key: str, names_prefixes: bool
) -> None:
    chosen = chosen_of(rows, Wish(key, PREFIXES if names_prefixes else ()))
    least = LOAD_FACTOR * min(row.requests for row in rows)
    within = [row for row in rows if row.requests <= least + min(MOST_SLACK, max(1.0, SLACK_OF_SLOTS * row.slots))]
    opened = [row for row in within if row.requests < row.slots] or within
    assert chosen in opened
    if names_prefixes:
        assert chosen.held == max(row.held for row in opened), "the longest beginning that is held wins"


@given(st.integers(1, 6), KEYS)
def test_with_affinity_and_nothing_held_the_first_in_the_keys_order_is_taken(count: int, key: str) -> None:
    groups = groups_of(count)
    assert choose(groups, {}, Wish(key)) == ranked(key, groups)[0]


def spread(groups: int, requests: int, slots: int, wish: Wish) -> list[int]:
    """How many of so many requests at once each group gets, where none of them ends and engines say nothing new."""
    endpoints = groups_of(groups)
    ledger, accounts = Ledger(), EngineAccounts()
    for each in endpoints:
        accounts.take(identity(each), EngineAccount(slots), 0.0)
    with ExitStack() as running:
        for _ in range(requests):
            chosen = choose(endpoints, ledger.loads, wish, accounts.known)
            assert chosen is not None
            running.enter_context(ledger.lease(identity(chosen), 500))
            accounts.note_sent(identity(chosen), wish.prefixes, 0.0)
        return [ledger.loads.get(identity(each), Load()).requests for each in endpoints]


@pytest.mark.parametrize("wish", [Wish("same", PREFIXES), Wish("same")], ids=["prefixes", "affinity alone"])
@pytest.mark.parametrize(
    ("groups", "requests", "slots"), [(2, 33, 16), (2, 33, 64), (2, 16, 256), (4, 20, 256), (4, 80, 16), (4, 80, 256)]
)
def test_one_prompt_that_all_share_does_not_crowd_one_group(groups: int, requests: int, slots: int, wish: Wish) -> None:
    """With slack in tokens one group got 33 before the other got any, and four shared 80 as 37, 0, 38 and 5."""
    counts = spread(groups, requests, slots, wish)
    assert sum(counts) == requests, counts
    assert max(counts) <= LOAD_FACTOR * min(counts) + min(MOST_SLACK, max(1.0, SLACK_OF_SLOTS * slots)) + 1, counts
    assert min(counts) > 0, counts


def test_what_was_sent_counts_as_held_until_the_engine_has_had_time_to_say_so() -> None:
    accounts = EngineAccounts()
    accounts.take("g", EngineAccount(held=frozenset({"old"})), 0.0)
    accounts.note_sent("g", [("new", 1.0)], 1.0)
    assert accounts.of("g").held == {"old", "new"}
    accounts.take("g", EngineAccount(held=frozenset({"other"})), 5.9)
    assert accounts.of("g").held == {"other", "new"}
    accounts.take("g", EngineAccount(held=frozenset({"other"})), 6.0)
    assert accounts.of("g").held == {"other"}
    accounts.keep(())
    assert accounts.of("g") == EngineAccount()


def test_no_candidate_no_choice() -> None:
    assert choose([], {}) is None
    assert choose([], {}, Wish("key", PREFIXES)) is None


@given(st.integers(2, 8), st.lists(KEYS, min_size=1, max_size=50, unique=True), st.data())
def test_a_group_that_leaves_moves_its_own_keys_only(count: int, keys: list[str], data: st.DataObject) -> None:
    groups = groups_of(count)
    gone = data.draw(st.sampled_from(groups))
    left = [one for one in groups if one is not gone]
    for key in keys:
        before, after = ranked(key, groups), ranked(key, left)
        assert [one for one in before if one is not gone] == after


def test_keys_spread_over_all_groups() -> None:
    groups = groups_of(4)
    firsts = [ranked(f"key {index}", groups)[0].group for index in range(4000)]
    shares = [firsts.count(index) for index in range(4)]
    assert all(850 < share < 1150 for share in shares), shares  # 1000 each; the deviation of one is 27


def test_a_new_incarnation_keeps_its_groups_keys() -> None:
    before, after = groups_of(3), groups_of(3)
    assert [identity(one) for one in before] != [identity(one) for one in after]
    for index in range(100):
        key = str(index)
        assert [one.group for one in ranked(key, before)] == [one.group for one in ranked(key, after)]


def test_a_session_goes_before_the_prompt_and_short_prompts_have_no_preference() -> None:
    long_text = TextPrompt(text="a" * PREFIX_CHARACTERS)
    assert affinity_key(TextPrompt(text="a" * (PREFIX_CHARACTERS - 1))) == ""
    assert affinity_key(long_text) == affinity_key(TextPrompt(text="a" * PREFIX_CHARACTERS + "b"))
    assert affinity_key(long_text) != affinity_key(TextPrompt(text="b" * PREFIX_CHARACTERS))
    assert affinity_key(long_text, "me") == affinity_key(TextPrompt(text="x"), "me") != affinity_key(long_text, "you")
    assert affinity_key(long_text, "me" * 128 + "x" * 32_000) == affinity_key(long_text, "me" * 128)
    assert affinity_key(long_text, salt="a") != affinity_key(long_text) != affinity_key(long_text, salt="b")
    assert affinity_key(TextPrompt(text="a"), salt="a") == "", "short prompts have no preference"
    ids = tuple(range(PREFIX_TOKENS))
    assert affinity_key(TokenPrompt(token_ids=ids[:-1])) == ""
    assert affinity_key(TokenPrompt(token_ids=ids)) == affinity_key(TokenPrompt(token_ids=(*ids, 5))) != ""


def test_chats_with_the_same_beginning_share_a_preference() -> None:
    system = ChatMessage(role="system", content="s" * PREFIX_CHARACTERS)
    keys = {
        affinity_key(ChatPrompt(messages=(system, ChatMessage(role="user", content=text)))) for text in ("a", "b" * 500)
    }
    assert len(keys) == 1
    other = ChatPrompt(messages=(ChatMessage(role="user", content=system.content),))
    assert affinity_key(other) not in keys


def request(max_tokens: int | None, generated: int = 0) -> GenerateRequest:
    """A request of ten prompt tokens."""
    return GenerateRequest(
        request_id="r",
        prompt=TokenPrompt(token_ids=tuple(range(10))),
        sampling=SamplingParams(max_tokens=max_tokens),
        generated_token_ids=tuple(range(generated)),
    )


def test_a_request_is_expected_to_cost_its_prompt_what_it_has_and_what_it_may_add() -> None:
    assert expected_tokens(request(7)) == 17
    assert expected_tokens(request(7, generated=5)) == 17
    assert expected_tokens(request(7, generated=7)) == 18, "an engine that only ends it is asked, too"
    assert expected_tokens(request(None)) == 10 + EXPECTED_ANSWER_TOKENS
    assert expected_tokens(request(100_000)) == 10 + EXPECTED_ANSWER_TOKENS


@given(st.lists(st.tuples(st.integers(1, 100), st.lists(st.integers(0, 60), max_size=5)), max_size=5))
def test_a_lease_leaves_nothing_behind(leases: list[tuple[int, list[int]]]) -> None:
    ledger = Ledger()
    for tokens, steps in leases:
        with ledger.lease("a", tokens) as lease:
            for step in steps:
                lease.spend(step)
                assert ledger.loads["a"].tokens == lease.tokens >= 0
        assert ledger.loads["a"].tokens == ledger.loads["a"].requests == 0
    ledger.keep(())
    assert ledger.loads == {}


def test_a_lease_survives_the_group_it_was_taken_on() -> None:
    ledger = Ledger()
    with ledger.lease("a", 5):
        ledger.keep(())
        assert ledger.loads["a"].tokens == 5
    ledger.keep(())
    assert ledger.loads == {}
