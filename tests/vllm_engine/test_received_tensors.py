"""A stage without tensors to receive into makes them once; the real runner is asked by `make test-vllm ARGS=all`."""

from types import SimpleNamespace
from typing import Any

import pytest

from stageline_vllm.plugin.received_tensors import give_tensors


class Runner:
    """The runner's part that is wrapped, refusing what vLLM's refuses."""

    max_num_tokens = 8
    device = "cpu"
    model_config = SimpleNamespace(dtype="bfloat16")

    def __init__(self, tensors: Any = None) -> None:
        self.intermediate_tensors = tensors
        self.made: list[dict[str, Any]] = []
        self.model = SimpleNamespace(make_empty_intermediate_tensors=self._make)

    def _make(self, **given: Any) -> str:
        self.made.append(given)
        return "made"

    def sync_and_gather_intermediate_tensors(self, num_tokens: int) -> tuple[int, Any]:
        assert self.intermediate_tensors is not None
        return num_tokens, self.intermediate_tensors


@pytest.fixture
def runner_class() -> type[Runner]:
    return type("Wrapped", (Runner,), dict(vars(Runner)))


def test_missing_tensors_are_made_once_as_vllm_makes_them(runner_class: type[Runner]) -> None:
    with pytest.raises(AssertionError):
        runner_class().sync_and_gather_intermediate_tensors(3)
    give_tensors(runner_class)
    give_tensors(runner_class)
    runner = runner_class()
    assert [runner.sync_and_gather_intermediate_tensors(number) for number in (3, 4)] == [(3, "made"), (4, "made")]
    assert runner.made == [{"batch_size": 8, "dtype": "bfloat16", "device": "cpu"}]


def test_tensors_that_are_there_stay(runner_class: type[Runner]) -> None:
    give_tensors(runner_class)
    runner = runner_class("vLLM's own")
    assert runner.sync_and_gather_intermediate_tensors(3) == (3, "vLLM's own")
    assert runner.made == []
