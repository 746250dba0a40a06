"""One `stageline up` of a tiny model seen three ways: its processes, an API server that tells the same, and bundles."""

import json
import re
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from cluster.readable_kube_api import TOKEN, ReadableKubeApi, readable_kube_api
from oracles.tiny_models import write_tiny_llama
from processes.serving_command import ServingCommand
from stageline_api import labels, ports
from stageline_local.session.state_file import LocalState, read_state

NAMESPACE = "default"
PLANTED_KEY, PLANTED_HEADER, PLANTED_PASSWORD = (f"planted-{where}-1" for where in ("variable", "header", "password"))
PLANTED = (PLANTED_KEY, PLANTED_HEADER, PLANTED_PASSWORD, TOKEN)
"""Secrets that no bundle may hold."""
DEADLINE_SECONDS = 240.0


def write_manifest(directory: Path, backoff_seconds: int) -> Path:
    """A PipelineModel of two stages whose variables hold secrets."""
    model = {
        "apiVersion": "stageline.dev/v1alpha1",
        "kind": "PipelineModel",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"source": f"file://{write_tiny_llama(directory / 'llama')}"},
            "parallelism": {"pipeline": 2},
            "restart": {"backoffSeconds": backoff_seconds},
            "template": {
                "env": [
                    {"name": "MY_API_KEY", "value": PLANTED_KEY},
                    {"name": "UPSTREAM", "value": f"https://user:{PLANTED_PASSWORD}@proxy.example:3128/"},
                    {"name": "OMP_NUM_THREADS", "value": "1"},
                ]
            },
        },
    }
    file = directory / "tiny.yaml"
    file.write_text(yaml.safe_dump(model))
    return file


def state_of(up: ServingCommand) -> LocalState:
    """What it wrote last."""
    state = read_state(up.state_dir / "tiny")
    assert state is not None
    return state


@contextmanager
def as_cluster(up: ServingCommand, directory: Path) -> Iterator[tuple[ReadableKubeApi, tuple[str, ...]]]:
    """The same objects and the same pods, told by an API server; with the options that lead there."""
    state = state_of(up)
    found = re.findall(r"admin on http://([\d.]+):(\d+)", (up.state_dir / "tiny" / "logs" / "gateway.log").read_text())
    gateway = {
        "metadata": {
            "name": "stageline-gateway-0",
            "namespace": NAMESPACE,
            "labels": {labels.APP_NAME: "stageline", labels.APP_COMPONENT: "gateway"},
        },
        "spec": {"containers": [{"name": "gateway"}]},
        "status": {"podIP": found[-1][0], "phase": "Running"},
    }
    here = f"/api/v1/namespaces/{NAMESPACE}"
    with readable_kube_api() as api:
        manifest = state.manifest | {"metadata": state.manifest["metadata"] | {"namespace": NAMESPACE}}
        api.objects = {
            f"/apis/stageline.dev/v1alpha1/namespaces/{NAMESPACE}/pipelinemodels": [manifest],
            f"{here}/pods": [*state.pods, gateway],
            f"{here}/events": [*state.events],
            f"{here}/configmaps": [*state.config_maps],
            f"{here}/services": [],
            "/api/v1/pods": [gateway],
        }
        api.texts["/version"] = json.dumps({"gitVersion": "v1.99.0"})
        # The gateway of a machine takes any admin port; a cluster's always has the contract's.
        api.ports[f"stageline-gateway-0:{ports.GATEWAY_ADMIN}"] = int(found[-1][1])
        for pod in state.pods:
            log = f"{here}/pods/{pod['metadata']['name']}/log"
            api.texts[log] = f"started\nAuthorization: Bearer {PLANTED_HEADER}\n"
        yield api, ("--kubeconfig", str(api.write_kubeconfig(directory / "kubeconfig", NAMESPACE)))


def archive_of(directory: Path) -> dict[str, str]:
    """Files of the one archive in a directory, without its folder."""
    (file,) = directory.glob("*.tar.gz")
    assert file.stat().st_mode & 0o077 == 0, "only its owner may read it"
    with tarfile.open(file) as archive:
        read = {each.name.partition("/")[2]: archive.extractfile(each) for each in archive}
        return {name: content.read().decode() for name, content in read.items() if content is not None}


def planted_in(files: dict[str, str]) -> list[tuple[str, str]]:
    """Each planted secret that a bundle holds, with the file it is in."""
    return [(name, secret) for name, text in files.items() for secret in PLANTED if secret in text]


def stage_pid(up: ServingCommand, stage: int) -> int:
    """Process id of one stage."""
    wanted = f"STAGELINE_STAGE_INDEX={stage}".encode()
    return next(pid for pid in up.stage_pids() if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def wait_for(file: Path, text: str, after: int = 0) -> None:
    """Until a file holds a text behind its first `after` characters."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while text not in written(file)[after:]:
        assert time.monotonic() < deadline, f"no {text!r} in:\n{written(file)[-3000:]}"
        time.sleep(0.05)


def written(file: Path) -> str:
    """What a process has written so far; it may be in the middle of a character."""
    return file.read_text(encoding="utf-8", errors="replace")
