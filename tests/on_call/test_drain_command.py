"""What `stageline drain` refuses, and in which words; what it does is in tests/cluster."""

from typing import Any

import pytest

from cluster.readable_kube_api import ReadableKubeApi
from stageline_cli.drain_command import Group, move_stages
from stageline_cli.main import run

PODS = "/api/v1/pods"


def refusal(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(words) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said, said
    return " ".join(said.split())


def test_a_node_that_can_not_be_cordoned_is_told_with_the_servers_words(
    api: ReadableKubeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    """This server takes no PATCH."""
    assert api.refused == []
    assert "node 'n' can't be cordoned: status 501" in refusal("drain", "n", capsys=capsys)


def test_who_may_not_read_pods_is_told_so(api: ReadableKubeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.refused.append(PODS)
    said = refusal("drain", "n", "--dry-run", capsys=capsys)
    assert "the pods of node 'n' can't be read: status 403" in said


class StagesThatWait:
    """A node whose groups may leave one at a time, each two looks after it was asked to."""

    node = "n"

    def __init__(self, *names: str) -> None:
        self.left = {Group("models", "chat", name, "1"): f"chat-{name}-1-0" for name in names}
        self.asked: list[str] = []
        self._leaving: dict[Group, int] = {}

    def groups(self) -> dict[Group, str]:
        for group in list(self._leaving):
            self._leaving[group] -= 1
            if self._leaving[group] < 0:
                del self._leaving[group], self.left[group]
        return {group: "" if group in self._leaving else pod for group, pod in self.left.items()}

    def evict(self, group: Group, pod: str) -> str:
        self.asked.append(pod)
        if self._leaving:
            return "status 429: Cannot evict pod as it would violate the pod's disruption budget."
        self._leaving[group] = 2
        return ""


def test_groups_go_one_at_a_time_and_each_change_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stageline_cli.drain_command._LOOK_SECONDS", 0.0)
    stages: Any = StagesThatWait("0", "1")
    said: list[str] = []
    move_stages(stages, 30.0, said.append)
    refused = "waits: status 429: Cannot evict pod as it would violate the pod's disruption budget."
    assert said == [
        "models/chat group 0: is being moved",
        f"models/chat group 1: {refused}",
        "models/chat group 1: is being moved",
    ]
    assert stages.asked.count("chat-0-1-0") == 1, "asked once: its pods end by themselves then"
    assert stages.left == {}
