"""What tests of commands that ask a cluster share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.readable_kube_api import ReadableKubeApi, readable_kube_api


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReadableKubeApi]:
    """An API server that answers what the test says, which commands find by their kubeconfig."""
    with readable_kube_api() as found:
        monkeypatch.setenv("KUBECONFIG", str(found.write_kubeconfig(tmp_path / "kubeconfig", "models")))
        yield found
