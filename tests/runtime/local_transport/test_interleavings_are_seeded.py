"""The interleaving itself: every order comes up, a seed repeats its own, and whoever can't go on is named at once."""

from collections.abc import Callable
from itertools import permutations

import pytest

from chaos.interleaving import DeadlockError, Interleaving


def order_of(seed: int, names: str) -> str:
    """Which of several tasks and one event came first, second and so on."""
    interleaving = Interleaving(seed)
    order: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    for name in names:
        interleaving.add_task(name, note(name))
    interleaving.add_event("event", lambda: "!" not in order, note("!"))
    interleaving.run()
    return "".join(order)


def test_every_order_comes_up() -> None:
    orders = {order_of(seed, "abc") for seed in range(400)}
    assert orders == {"".join(order) for order in permutations("abc!")}


def test_a_seed_repeats_its_order() -> None:
    assert [order_of(seed, "abcdef") for seed in range(20)] == [order_of(seed, "abcdef") for seed in range(20)]


def test_tasks_pass_work_on_in_turns() -> None:
    interleaving = Interleaving(3)
    queue: list[int] = []
    taken: list[int] = []

    def produce() -> None:
        for item in range(50):
            interleaving.wait_until(lambda: len(queue) < 2, "room")
            queue.append(item)

    def consume() -> None:
        while len(taken) < 50:
            interleaving.wait_until(lambda: bool(queue), "an item")
            taken.append(queue.pop(0))

    interleaving.add_task("producer", produce)
    interleaving.add_task("consumer", consume)
    interleaving.run()
    assert taken == list(range(50))
    assert interleaving.turns >= 100


def test_a_deadlock_names_what_each_task_waits_for() -> None:
    interleaving = Interleaving(0)
    interleaving.add_task("left", lambda: interleaving.wait_until(lambda: False, "the right one"))
    interleaving.add_task("right", lambda: interleaving.wait_until(lambda: False, "the left one"))
    interleaving.add_task("third", lambda: None)
    with pytest.raises(DeadlockError) as caught:
        interleaving.run()
    assert str(caught.value).splitlines()[1:] == [
        "left: waits for the right one",
        "right: waits for the left one",
        "third: ended",
    ]


def test_a_livelock_ends() -> None:
    interleaving = Interleaving(0, max_turns=500)
    interleaving.add_task("waiter", lambda: interleaving.wait_until(lambda: False, "godot"))
    interleaving.add_event("busy", lambda: True, lambda: None)
    with pytest.raises(DeadlockError, match="no end in sight after 500 turns"):
        interleaving.run()


@pytest.mark.parametrize("fails_in", ["task", "event", "condition"])
def test_the_first_failure_ends_everything(fails_in: str) -> None:
    interleaving = Interleaving(1)

    def fail() -> None:
        raise ValueError(fails_in)

    def fail_to_judge() -> bool:
        raise ValueError(fails_in)

    condition = fail_to_judge if fails_in == "condition" else lambda: False
    interleaving.add_task("waiter", lambda: interleaving.wait_until(condition, "what never comes"))
    if fails_in == "task":
        interleaving.add_task("failing", fail)
    if fails_in == "event":
        interleaving.add_event("failing", lambda: True, fail)
    with pytest.raises(ValueError, match=fails_in):
        interleaving.run()
