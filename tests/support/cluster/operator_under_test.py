"""Operators for cluster tests: as processes, as a person starts them, and in the test, where a crash can be placed."""

import asyncio
import gc
import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.api import ClusterApi, wait_until
from cluster.under_test import Cluster
from processes.repository_files import ROOT
from stageline_kubernetes.login import load_configuration
from stageline_operator.controller.process import OperatorProcess
from stageline_operator.controller.settings import OperatorSettings

IMAGE: Final = "stageline:test"
RULES: Final[dict[str, Any]] = yaml.safe_load(
    (ROOT / "charts/stageline/files/operator-rbac.yaml").read_text(encoding="utf-8")
)
"""The chart's, by where they are granted."""
_RBAC_GROUP: Final = "rbac.authorization.k8s.io"
_START_SECONDS: Final = 150.0
_STOP_SECONDS: Final = 90.0
_READY_SECONDS: Final = 180.0
_ANSWER_SECONDS: Final = 60.0


def grant(cluster: Cluster, namespace: str, kind: str, name: str, rules: list[dict[str, Any]]) -> None:
    """A role with `rules`, bound to the ServiceAccount `operator` of the namespace."""
    within = {} if kind == "ClusterRole" else {"namespace": namespace}
    subject = {"kind": "ServiceAccount", "name": "operator", "namespace": namespace}
    role = {"apiVersion": f"{_RBAC_GROUP}/v1", "kind": kind, "metadata": {"name": name, **within}, "rules": rules}
    binding = {
        "apiVersion": f"{_RBAC_GROUP}/v1",
        "kind": f"{kind}Binding",
        "metadata": {"name": name, **within},
        "roleRef": {"apiGroup": _RBAC_GROUP, "kind": kind, "name": name},
        "subjects": [subject],
    }
    cluster.apply(role, binding)


@dataclass
class OperatorReplica:
    """`stageline operator` as a process of its own."""

    kubeconfig: Path
    log_file: Path
    arguments: tuple[str, ...]
    under: tuple[str, ...] = ()
    """A command that becomes the operator."""
    process: "subprocess.Popen[bytes]" = field(init=False)

    def start(self) -> None:
        """Start it and wait until it listens."""
        command = [*self.under, str(Path(sys.executable).parent / "stageline"), "operator"]
        command += ["--kubeconfig", str(self.kubeconfig)]
        command += ["--image", IMAGE, "--metrics-host", "127.0.0.1", "--metrics-port", "0", *self.arguments]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        wait_until("the operator listens", lambda: self.port, _START_SECONDS, self.log)

    @property
    def port(self) -> int:
        """Its metrics port; 0 until it said so."""
        said = [line["message"] for line in self.lines() if "metrics and health on port" in line["message"]]
        return int(said[-1].rpartition(" ")[2]) if said else 0

    def lines(self) -> list[dict[str, Any]]:
        """Its log; every line must be JSON."""
        text = self.log_file.read_text(encoding="utf-8") if self.log_file.exists() else ""
        return [dict(json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def log(self) -> str:
        """For failure messages."""
        return self.log_file.read_text(encoding="utf-8")[-6000:]

    def get(self, path: str) -> httpx.Response:
        """Ask its HTTP server."""
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=_ANSWER_SECONDS, trust_env=False)

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Samples of one metric by label values, in the order of the labels' names."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        found = [sample for family in families for sample in family.samples if sample.name == name]
        return {tuple(value for _, value in sorted(sample.labels.items())): sample.value for sample in found}

    @property
    def leads(self) -> bool:
        """Whether it says that it acts."""
        return self.samples("stageline_operator_leader") == {(): 1.0}

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=_STOP_SECONDS)


@contextmanager
def operator_replica(
    kubeconfig: Path, log_file: Path, *arguments: str, under: tuple[str, ...] = ()
) -> Iterator[OperatorReplica]:
    """A replica that lives as long as the block."""
    replica = OperatorReplica(kubeconfig, log_file, arguments, under)
    replica.start()
    try:
        yield replica
    finally:
        if replica.process.poll() is None:
            replica.process.send_signal(signal.SIGCONT)
            replica.end(signal.SIGKILL)


class Killed(BaseException):
    """The operator's process ended here."""


def run_until_killed(
    kubeconfig: Path, namespace: str, before_write: Callable[[str], None], is_over: Callable[[], bool], seconds: float
) -> bool:
    """One life of an operator that acts without a lease; returns whether `is_over` ended it, not `Killed`."""

    async def live() -> bool:
        settings = OperatorSettings(
            IMAGE, "test", namespaces=(namespace,), kubeconfig=kubeconfig, metrics_host="127.0.0.1", metrics_port=0
        )
        configuration = await load_configuration(kubeconfig, None)
        stop = asyncio.Event()
        operating = asyncio.create_task(OperatorProcess(settings, configuration, before_write).run(stop))
        async with asyncio.timeout(seconds):
            while not operating.done():
                if await asyncio.to_thread(is_over):
                    stop.set()
                    await asyncio.wait({operating})
                    assert isinstance(operating.exception(), Killed | None)
                    return True
                await asyncio.wait({operating}, timeout=0.1)
        if isinstance(error := operating.exception(), Killed):
            return False
        raise AssertionError(f"the operator ended by itself: {error!r}")

    with _closed_by_the_kernel():
        return asyncio.run(live())


@contextmanager
def _closed_by_the_kernel() -> Iterator[None]:
    """A process that ends leaves its connections to the kernel; here the block does, so the end must free them.

    An API server that is slow to say goodbye keeps a TLS connection open for longer than the loop lives.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unclosed (transport|<socket)", ResourceWarning)
        try:
            yield
        finally:
            gc.collect()


def pipeline_model(name: str, template: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """A PipelineModel of two stages."""
    return {
        "apiVersion": "stageline.dev/v1alpha1",
        "kind": "PipelineModel",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": "file:///models/tiny"},
            "parallelism": {"pipeline": 2},
            "template": template,
        }
        | spec,
    }


def create_model(api: ClusterApi, namespace: str, name: str, template: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Create a PipelineModel of two stages."""
    response = api.create("PipelineModel", pipeline_model(name, template, **spec), namespace)
    assert response.status_code == 201, response.text
    return dict(response.json())


def condition_of(model: dict[str, Any] | None, kind: str = "Ready") -> dict[str, Any]:
    """One condition of a PipelineModel; empty when it has none yet."""
    conditions = ((model or {}).get("status") or {}).get("conditions", [])
    return next((dict(each) for each in conditions if each["type"] == kind), {})


def wait_ready(
    api: ClusterApi, namespace: str, name: str, seconds: float = _READY_SECONDS, context: Callable[[], Any] = str
) -> None:
    """Until the PipelineModel is Ready."""

    def look() -> bool:
        return condition_of(api.get("PipelineModel", name, namespace)).get("status") == "True"

    def shown() -> str:
        return f"{json.dumps(api.get('PipelineModel', name, namespace), indent=1)[-5000:]}\n{context()}"

    wait_until(f"{name} is ready", look, seconds, shown)
