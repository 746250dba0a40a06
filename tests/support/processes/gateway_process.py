"""`stageline gateway` outside the cluster, serving namespaces of it with the rights that it documents."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.api import wait_until
from cluster.under_test import Cluster
from processes.ended_process import end_process
from processes.free_ports import free_port
from stageline_api.engine_access import KEYS_SECRET
from stageline_gateway.telemetry.metric_names import RESUMES
from stageline_local.node import child_exec

ACCOUNT: Final = "stageline-gateway"
HOLD_SECONDS: Final = 300
"""How long requests wait for a group: as long as a busy machine may need to make one anew."""
_RBAC: Final = "rbac.authorization.k8s.io"
_START_SECONDS: Final = 150.0
_END_SECONDS: Final = 90.0
_ANSWER_SECONDS: Final = 60.0


def gateway_permissions(namespace: str) -> list[dict[str, Any]]:
    """The gateway's account in a namespace: it reads pods, PipelineModels and one Secret, and writes nothing."""
    metadata = {"name": ACCOUNT, "namespace": namespace}
    verbs = ["get", "list", "watch"]
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": verbs},
        {"apiGroups": ["stageline.dev"], "resources": ["pipelinemodels"], "verbs": verbs},
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [KEYS_SECRET], "verbs": ["get"]},
    ]
    role = {"apiVersion": f"{_RBAC}/v1", "kind": "Role", "metadata": metadata}
    reference = {"apiGroup": _RBAC, "kind": "Role", "name": ACCOUNT}
    subjects = [{"kind": "ServiceAccount", **metadata}]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {**role, "rules": rules},
        {**role, "kind": "RoleBinding", "roleRef": reference, "subjects": subjects},
    ]


class GatewayProcess:
    """A gateway of one namespace, or of those that it `serves`: with what rights its account there has already."""

    def __init__(
        self, cluster: Cluster, namespace: str, directory: Path, serves: str = "", options: tuple[str, ...] = ()
    ) -> None:
        self._options = options
        if not serves:
            cluster.apply(*gateway_permissions(namespace))
        self._kubeconfig = cluster.service_account_kubeconfig(namespace, ACCOUNT, directory)
        self._served = serves or namespace
        self._log_file = directory / "gateway.log"
        self._port, self._admin_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it and wait until it answers at all."""
        wrapper = (sys.executable, "-I", "-S", child_exec.__file__, str(os.getpid()))
        options = ["--kubernetes", "--namespace", self._served, "--port", str(self._port)]
        options += ["--admin-port", str(self._admin_port), "--hold-seconds", str(HOLD_SECONDS), *self._options]
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*wrapper, sys.executable, "-m", "stageline_cli.main", "gateway", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "KUBECONFIG": str(self._kubeconfig)},
            )
        wait_until("the gateway answers", self._answers, _START_SECONDS, self.log_end)

    def ask_admin(self, path: str) -> httpx.Response:
        """What its admin port answers."""
        return httpx.get(f"http://127.0.0.1:{self._admin_port}{path}", timeout=_ANSWER_SECONDS, trust_env=False)

    def serves(self) -> bool:
        """Whether some group is ready for it."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def resumed(self) -> float:
        """How many answers another run took over in the middle."""
        return self.figure(RESUMES.name, outcome="resumed")

    def figure(self, name: str, **labels: str) -> float:
        """One of its metrics, over all series that have these labels."""
        page = self.ask_admin("/metrics").text
        samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
        return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())

    def log_end(self) -> str:
        """The end of its log."""
        return self._log_file.read_text(errors="replace")[-4000:] if self._log_file.exists() else ""

    def end(self) -> None:
        """End it."""
        if self._process is not None:
            end_process(self._process, _END_SECONDS)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the gateway ended with {self._process.returncode}:\n{self.log_end()}"
        try:
            return httpx.get(f"{self.url}/healthz", timeout=2, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def running_gateway(
    cluster: Cluster, namespace: str, directory: Path, serves: str = "", options: tuple[str, ...] = ()
) -> Iterator[GatewayProcess]:
    """A gateway for the length of the block."""
    gateway = GatewayProcess(cluster, namespace, directory, serves, options)
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.end()
