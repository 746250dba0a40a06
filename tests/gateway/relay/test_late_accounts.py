"""Accounts that may wait are told in rounds, a few in a turn of the loop, and every one of them."""

import asyncio
from functools import partial

import pytest

from stageline_gateway.engine_client.late_accounts import MOST_IN_A_TURN, LateAccounts

ENGINE, OTHER = "http://a", "http://b"


def test_a_round_takes_several_turns_so_that_others_come_between() -> None:
    count, order = 2 * MOST_IN_A_TURN + 1, list[int | str]()

    async def one_round() -> None:
        loop, late, is_over = asyncio.get_running_loop(), LateAccounts(period_seconds=0.01), asyncio.Event()

        def take_a_turn() -> None:
            order.append("another's")
            if not is_over.is_set():
                loop.call_soon(take_a_turn)

        for number in range(count):
            late.add(ENGINE, partial(order.append, number))
        late.add(ENGINE, is_over.set)
        take_a_turn()
        await is_over.wait()

    asyncio.run(one_round())
    assert [one for one in order if isinstance(one, int)] == list(range(count))
    assert "another's" in order[order.index(0) : order.index(MOST_IN_A_TURN)], order
    assert "another's" in order[order.index(MOST_IN_A_TURN) : order.index(count - 1)], order


def test_who_is_added_twice_is_called_once_a_round_and_who_is_taken_away_not_at_all() -> None:
    calls: list[str] = []

    async def rounds() -> list[str]:
        late = LateAccounts(period_seconds=0.0)
        a, b = partial(calls.append, "a"), partial(calls.append, "b")
        late.add(ENGINE, a)
        late.add(ENGINE, b)
        late.add(ENGINE, a)
        late.discard(ENGINE, b)
        late.discard(ENGINE, b)
        await asyncio.sleep(0.01)
        first = list(calls)
        late.add(ENGINE, b)
        await asyncio.sleep(0.01)
        return first

    assert asyncio.run(rounds()) == ["a"]
    assert calls == ["a", "b"]


def test_what_is_brought_up_to_date_leaves_nothing_for_the_round() -> None:
    calls: list[int] = []

    async def both() -> None:
        late = LateAccounts(period_seconds=0.01)
        for number in range(3 * MOST_IN_A_TURN):
            late.add(ENGINE, partial(calls.append, number))
        late.add(OTHER, partial(calls.append, -1))
        late.bring_up_to_date(ENGINE)
        assert calls == list(range(3 * MOST_IN_A_TURN)), "of the other engine nothing"
        await asyncio.sleep(0.03)

    asyncio.run(both())
    assert calls == [*range(3 * MOST_IN_A_TURN), -1]


def test_a_bug_in_one_account_is_logged_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def fail() -> None:
        raise ValueError

    async def round_of_three() -> None:
        late = LateAccounts(period_seconds=0.0)
        late.add(ENGINE, partial(calls.append, 1))
        late.add(ENGINE, fail)
        late.add(ENGINE, partial(calls.append, 2))
        await asyncio.sleep(0.01)

    asyncio.run(round_of_three())
    assert calls == [1, 2]
    assert "a bug in the gateway: ValueError" in caplog.text
