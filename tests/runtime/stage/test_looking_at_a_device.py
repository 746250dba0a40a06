"""Who waits for a tensor looks at its device meanwhile: what that has finished is told before the tensor comes."""

from collections import deque

from stageline_runtime.stage.step.in_flight import look_until


def test_finished_plans_are_told_while_nothing_has_come_and_then_it_is_waited_for_in_one_go() -> None:
    """The plan in flight is done at the third look; nothing ever comes, and the wait ends all the same."""
    in_flight, told, looks = deque([7]), [], 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            told.append(in_flight.popleft())

    look_until(look, lambda: not in_flight)
    assert (told, looks) == ([7], 3)


def test_what_has_come_is_taken_at_once() -> None:
    def look() -> None:
        raise AssertionError("it is there")

    look_until(look, lambda: True)


def test_a_tensor_that_comes_ends_the_looking_although_the_device_still_works() -> None:
    answers = deque([False, False, True])
    looks: list[int] = []
    look_until(lambda: looks.append(1), answers.popleft)
    assert (len(looks), list(answers)) == (1, [])
