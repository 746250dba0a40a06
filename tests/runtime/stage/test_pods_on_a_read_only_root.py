"""Stage pods as they are planned, under a user without a name and on a read-only root: they serve, and write only where
they may.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from cluster.node_pods import IMAGE, NodeFixture
from oracles.tiny_models import write_tiny_llama
from processes.nameless_user import NAMELESS_UID, as_nameless_user, skip_without_namespaces
from stageline_api import ports
from stageline_api.resource.pipeline_model import PipelineModel
from stageline_operator.planner.objects import (
    GroupIncarnation,
    build_bus_secret,
    build_config_map,
    build_engine_keys_secret,
    build_stage_pod,
)

START_SECONDS = 300.0
NAME = "tiny-0-1-0"

WRITES = r"""
import getpass, json, os, pathlib, tempfile
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl
from triton.runtime.cache import get_cache_manager
import stageline_runtime.stage.process, stageline_runtime.accelerator.cuda, stageline_runtime.models.device.kernels

@triton.jit
def doubled(source, target, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(target + at, 2 * tl.load(source + at))

source, target = torch.arange(8.0), torch.zeros(8)
doubled[(1,)](source, target, 8)
assert target.tolist() == [2.0 * value for value in range(8)], target
triton_cache = pathlib.Path(get_cache_manager("a" * 64).put(b"kernel", "kernel.cubin"))
(pathlib.Path.home() / ".config").mkdir()
with tempfile.NamedTemporaryFile():
    pass
refused = []
for folder in ("/", "/usr", "/var/tmp", os.path.dirname(torch.__file__), os.environ["STAGELINE_CONFIG"] + ".d"):
    try:
        pathlib.Path(folder, "written").mkdir(parents=True)
    except OSError as error:
        refused.append(os.strerror(error.errno))
try:
    name = getpass.getuser()
except (KeyError, OSError):
    name = None
said = dict(uid=os.getuid(), name=name, refused=refused, triton=str(triton_cache))
pathlib.Path(os.environ["TRITON_CACHE_DIR"], "said.json").write_text(json.dumps(said))
"""


def planned(model_dir: Path, tmp_path: Path) -> tuple[PipelineModel, dict[str, Any]]:
    """A model of one stage, and its pod as the operator plans it."""
    cache = tmp_path / "node-cache"
    cache.mkdir()
    spec = {
        "model": {"source": f"file://{model_dir}", "cache": {"hostPath": str(cache)}},
        "engine": {"device": "cpu", "maxModelLen": 64, "maxNumSeqs": 2},
        "placement": {"spread": "None"},
    }
    head = {"apiVersion": "stageline.dev/v1alpha1", "kind": "PipelineModel", "metadata": {"name": "tiny"}}
    model = PipelineModel.model_validate({**head, "spec": spec})
    return model, build_stage_pod(model, GroupIncarnation(0, 1), 0, "r", IMAGE)


def confined(pod: dict[str, Any]) -> dict[str, Any]:
    """Its containers, each with what the kubelet would give it: the user, and no place to write but its volumes."""
    for each in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]:
        writable = [mount["mountPath"] for mount in each["volumeMounts"] if not mount.get("readOnly")]
        # The node rewrites both paths of a volume and the last words' to where they are on this machine.
        prefix = as_nameless_user([*writable, each["terminationMessagePath"]], keeps_home=True)
        each["command"] = [*prefix, *each["command"]]
    return pod


def on_node(state_dir: Path, model: PipelineModel, body: Callable[[NodeFixture], Awaitable[None]]) -> None:
    async def run() -> None:
        fixture = NodeFixture(state_dir)
        fixture.store.apply(build_config_map(model, "r"))
        fixture.store.apply(build_bus_secret(model, "token"))
        fixture.store.apply(build_engine_keys_secret(model, "key-of-this-namespace"))
        try:
            await body(fixture)
        finally:
            await fixture.node.close(grace_seconds=0)

    asyncio.run(run())


def test_a_planned_pod_prepares_loads_and_answers(tmp_path: Path) -> None:
    skip_without_namespaces()
    model, pod = planned(write_tiny_llama(tmp_path / "model"), tmp_path)

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(confined(pod))

        def is_ready() -> bool:
            status = fixture.status(NAME)
            assert status["phase"] not in ("Failed", "Succeeded"), (status, fixture.log("stage", NAME))
            return all(each.get("ready") for each in status["containerStatuses"]) and bool(status["containerStatuses"])

        await fixture.until(is_ready, START_SECONDS)
        address = fixture.status(NAME)["podIP"]
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            answer = await client.get(f"http://{address}:{ports.ENGINE_HTTP}/readyz")
        assert answer.is_success, answer.text

    on_node(tmp_path / "node", model, body)


def test_a_stage_container_compiles_a_kernel_and_can_write_nowhere_else(tmp_path: Path) -> None:
    skip_without_namespaces()
    model, pod = planned(write_tiny_llama(tmp_path / "model"), tmp_path)
    stage = pod["spec"]["containers"][0]
    pod["spec"]["containers"] = [stage]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        del stage[probe]
    stage["command"] = ["python", "-c", WRITES]

    async def body(fixture: NodeFixture) -> None:
        fixture.node.create_pod(confined(pod))
        await fixture.until_ended("prepare", NAME)
        ended = await fixture.until_ended("stage", NAME)
        assert ended["exitCode"] == 0, fixture.log("stage", NAME)

    on_node(tmp_path / "node", model, body)
    compiled = tmp_path / "node-cache" / "compiled"
    said = json.loads((compiled / "triton" / "said.json").read_text())
    assert (said["uid"], said["name"]) == (NAMELESS_UID, None)
    assert said["refused"] == ["Read-only file system"] * 5, said
    assert Path(said["triton"]).is_relative_to(compiled / "triton")
