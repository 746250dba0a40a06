"""What `stageline restart` and `rollback` refuse, and in which words; what they do is in tests/cluster."""

import json
from typing import Any

import pytest

from cluster.manifest_samples import manifest
from cluster.readable_kube_api import ReadableKubeApi
from stageline_cli.main import run

MODEL = "/apis/stageline.dev/v1alpha1/namespaces/models/pipelinemodels/chat"
CONFIG_MAPS = "/api/v1/namespaces/models/configmaps"


def put_model(api: ReadableKubeApi, **spec: Any) -> None:
    body = manifest(name="chat")
    metadata = body["metadata"] | {"namespace": "models", "resourceVersion": "7", "generation": 1}
    api.texts[MODEL] = json.dumps(body | {"metadata": metadata, "spec": body["spec"] | spec})


def refusal(*words: str, capsys: pytest.CaptureFixture[str], status: int = 1) -> str:
    assert run(words) == status
    said = capsys.readouterr().err
    assert "Traceback" not in said, said
    return " ".join(said.split())


def test_a_suspended_model_has_nothing_to_restart(api: ReadableKubeApi, capsys: pytest.CaptureFixture[str]) -> None:
    put_model(api, suspend=True)
    assert "chat is suspended: it has no group to restart" in refusal("restart", "chat", capsys=capsys)


@pytest.mark.parametrize("command", ["restart", "rollback"])
def test_who_may_not_read_the_model_is_told_so(
    command: str, api: ReadableKubeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.refused.append(MODEL)
    said = refusal(command, "chat", capsys=capsys)
    assert f"PipelineModel 'chat' can't be read: status 403: {MODEL} is forbidden to user me" in said


def test_who_may_not_read_revisions_is_told_so(api: ReadableKubeApi, capsys: pytest.CaptureFixture[str]) -> None:
    put_model(api)
    api.refused.append(CONFIG_MAPS)
    assert "revisions of 'chat' can't be read: status 403" in refusal("rollback", "chat", capsys=capsys)


def test_a_change_that_is_not_taken_is_told_with_the_servers_words(
    api: ReadableKubeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    """This server takes no PATCH."""
    put_model(api)
    assert "PipelineModel 'chat' can't be changed: status 501" in refusal("restart", "chat", capsys=capsys)


def test_without_another_revision_there_is_nothing_to_go_back_to(
    api: ReadableKubeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    put_model(api)
    api.objects[CONFIG_MAPS] = []
    said = refusal("rollback", "chat", capsys=capsys)
    assert "the rollout has ended, and earlier revisions are gone; apply the older file" in said
