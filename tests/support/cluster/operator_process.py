"""`stageline operator` outside the cluster, with exactly the rights of the chart's role."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.api import wait_until
from cluster.node_pods import IMAGE
from cluster.under_test import Cluster
from processes.ended_process import end_process
from processes.free_ports import free_port
from stageline_local.node import child_exec
from stageline_local.session.local_overrides import LOCAL_IMAGE
from stageline_operator.controller.client.rbac import lease_rules, node_rules, workload_rules

NAMESPACE: Final = "stageline-test"
ACCOUNT: Final = "stageline-test-operator"
VLLM_IMAGE: Final = IMAGE
"""Stands for vLLM's own: nothing of Stageline is in it."""
_RBAC: Final = "rbac.authorization.k8s.io"
_START_SECONDS: Final = 150.0
_END_SECONDS: Final = 90.0
_ANSWER_SECONDS: Final = 60.0


def operator_permissions() -> list[dict[str, Any]]:
    """The operator's account and what it may do: the rules that the chart grants, and no others."""
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}

    def _bound(kind: str, rules: list[dict[str, Any]], namespace: str | None) -> list[dict[str, Any]]:
        metadata = {"name": ACCOUNT} | ({"namespace": namespace} if namespace else {})
        role = {"apiVersion": f"{_RBAC}/v1", "kind": kind, "metadata": metadata}
        reference = {"apiGroup": _RBAC, "kind": kind, "name": ACCOUNT}
        return [
            {**role, "rules": rules},
            {**role, "kind": f"{kind}Binding", "roleRef": reference, "subjects": [subject]},
        ]

    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, "namespace": NAMESPACE}},
        *_bound("ClusterRole", [*workload_rules(), *node_rules()], None),
        *_bound("Role", lease_rules(), NAMESPACE),
    ]


class OperatorProcess:
    """One replica."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self._cluster = cluster
        cluster.apply(*operator_permissions())
        self._kubeconfig = cluster.service_account_kubeconfig(NAMESPACE, ACCOUNT, directory)
        self._directory = directory
        self._port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id while it runs."""
        assert self.process is not None, "the operator is not running"
        return self.process.pid

    def start(self) -> None:
        """Start it and wait until it serves."""
        self._directory.mkdir(parents=True, exist_ok=True)
        wrapper = (sys.executable, "-I", "-S", child_exec.__file__, str(os.getpid()))
        options = ["--kubeconfig", str(self._kubeconfig), "--image", LOCAL_IMAGE, "--lease-namespace", NAMESPACE]
        options += ["--vllm-image", VLLM_IMAGE]
        options += ["--metrics-host", "127.0.0.1", "--metrics-port", str(self._port)]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, "-m", "stageline_cli.main", "operator", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
            )
        wait_until("the operator serves", self._is_ready, _START_SECONDS, self.log_end)

    def recover(self) -> None:
        """Start it unless it runs."""
        if self.process is None or self.process.poll() is not None:
            self.start()

    @property
    def log_file(self) -> Path:
        """What it says."""
        return self._directory / "operator.log"

    def log_end(self) -> str:
        """The end of its log."""
        return self.log_file.read_text(errors="replace")[-4000:] if self.log_file.exists() else ""

    def metrics(self) -> str:
        """Its metrics in Prometheus form."""
        return httpx.get(f"http://127.0.0.1:{self._port}/metrics", timeout=_ANSWER_SECONDS, trust_env=False).text

    def passes(self) -> float:
        """Passes over models since it started."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.metrics())
            for sample in family.samples
            if sample.name == "stageline_operator_reconcile_total"
        )

    def end(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """End it by a signal."""
        if self.process is not None:
            end_process(self.process, _END_SECONDS, with_signal)
            self.process = None

    def forget(self) -> None:
        """Take its account and rights out of a cluster that is not ours; ours ends with all that is in it."""
        if self._cluster.plane is None:
            manifests = yaml.safe_dump_all(operator_permissions())
            self._cluster.kubectl_ok("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=manifests)

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the operator ended with {self.process.returncode}:\n{self.log_end()}"
        try:
            return httpx.get(f"http://127.0.0.1:{self._port}/readyz", timeout=2, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False
