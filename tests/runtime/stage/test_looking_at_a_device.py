"""Who waits for a tensor looks at its device meanwhile: what that has finished is told before the tensor comes."""

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stageline_runtime.stage.process import StageProcess
from stageline_runtime.stage.step.in_flight import look_until
from stageline_runtime.transport.protocol import PeerLostError


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


def test_links_are_asked_while_a_receive_hangs() -> None:
    """A receive from a lost peer never ends, and only its link says why."""

    class Hanging:
        oldest_seq = 7

        def __len__(self) -> int:
            return 1

        def finished(self) -> list[Any]:
            raise AssertionError("waited for results that never come")

    def check(seq: int) -> None:
        raise PeerLostError(0, "receive hidden", "NCCL reported COMM_ERROR", seq=seq)

    stage = SimpleNamespace(in_flight=Hanging(), transport=SimpleNamespace(check=check))
    process = SimpleNamespace(_joined=SimpleNamespace(on_devices=None))
    with pytest.raises(PeerLostError, match=r"plan 7: .*NCCL reported COMM_ERROR"):
        StageProcess._finish_done(cast(StageProcess, process), cast(Any, None), cast(Any, stage))
