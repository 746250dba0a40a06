"""Which of its container's devices a supervisor lets each rank see."""

import pytest

from stageline_runtime.stage.ranks.supervisor import VISIBLE_DEVICES, visible_device


@pytest.mark.parametrize(
    ("named", "seen"),
    [
        (None, ["0", "1", "2"]),
        ("4,7,5", ["4", "7", "5"]),
        (" GPU-a , GPU-b ,", ["GPU-a", "GPU-b", ""]),
        ("", ["", "", ""]),
    ],
)
@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_each_rank_sees_the_one_of_its_number_or_none(asked: str, named: str | None, seen: list[str]) -> None:
    environ = {} if named is None else {VISIBLE_DEVICES: named}
    assert [visible_device(rank, asked, environ)[VISIBLE_DEVICES] for rank in range(3)] == seen


def test_ranks_on_cpus_are_told_nothing_of_devices() -> None:
    assert visible_device(1, "cpu", {VISIBLE_DEVICES: "0,1"}) == {}
