"""A real Kubernetes control plane: etcd, API server, controller-manager and scheduler, for tests.

RBAC and Pod Security admission are on, as in a cluster. Everything lives in one directory and ends with the test
process, however that ends. On loopback, where it is by default, it differs from a cluster: no EndpointSlices are made,
because they refuse the loopback addresses that pods have there, and a silent node counts as lost after seconds instead
of most of a minute. For real nodes it has an address that these reach, and differs in nothing.
"""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from cluster.kubeconfig_file import write_kubeconfig
from cluster.kubelet.api_access import read_kubeconfig
from processes.free_ports import free_port
from stageline_local.node import child_exec

NODE_LOST_SECONDS: Final = 15
"""How long after its last heartbeat a node counts as lost: many beats, of which a busy machine may lose some."""
_START_SECONDS: Final = 200.0
_STOP_SECONDS: Final = 60.0
_USERS: Final = {
    "admin": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
    "stageline-node": "",
}
_WITHOUT_CONTROLLERS: Final = ("endpoints-controller", "endpointslice-controller", "endpointslice-mirroring-controller")
_LOOPBACK: Final = "127.0.0.1"


@dataclass
class ControlPlane:
    """A running control plane. `kubeconfigs` has one file for each user of `_USERS` and of `more_users`."""

    directory: Path
    binaries: Path
    etcd_port: int = field(default_factory=free_port)
    api_port: int = field(default_factory=free_port)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    api_server_options: tuple[str, ...] = ()
    feature_gates: tuple[str, ...] = ()
    """Features to switch on in every part, by name."""
    address: str = _LOOPBACK
    """Of the API server; one that is not loopback is for real nodes."""
    more_users: Mapping[str, str] = field(default_factory=dict)
    """Users by name, with the group of each."""

    @property
    def url(self) -> str:
        """Where the API server listens."""
        return f"https://{self.address}:{self.api_port}"

    @property
    def admin_kubeconfig(self) -> Path:
        """May do everything."""
        return self.kubeconfig("admin")

    @property
    def kubectl(self) -> Path:
        """The kubectl of the same version."""
        return self.binaries / "kubectl"

    def kubeconfig(self, user: str) -> Path:
        """Kubeconfig of one of the built-in users."""
        return self.directory / "kubeconfigs" / f"{user.replace(':', '-')}.yaml"

    def client(self) -> httpx.Client:
        """An HTTP client that may do everything."""
        access = read_kubeconfig(self.admin_kubeconfig)
        return httpx.Client(base_url=access.url, headers=access.headers, verify=access.tls, timeout=30, trust_env=False)

    def start(self) -> None:
        """Start everything and wait until pods could be made in the default namespace."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "service-account.key").write_bytes(self._output("service-account-key"))
        users = {**_USERS, **self.more_users}
        tokens = {user: secrets.token_hex(16) for user in users}
        lines = [f'{token},{user},{user},"{users[user]}"' for user, token in tokens.items()]
        (self.directory / "tokens.csv").write_text("\n".join(lines) + "\n")
        self._start_etcd()
        self.start_api_server()
        cluster = {"server": self.url, "certificate-authority": str(self._certificate)}
        for user, token in tokens.items():
            write_kubeconfig(self.kubeconfig(user), cluster, user, token)
        self.wait_ready()
        self._start_controllers()
        self._wait_until("the default ServiceAccount", self._has_default_service_account)

    def start_api_server(self) -> None:
        """Start the API server alone; it keeps its port and its certificate."""
        directory = self.directory
        key = directory / "service-account.key"
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            *self._address_options(),
            f"--secure-port={self.api_port}",
            f"--cert-dir={directory / 'certificates'}",
            f"--token-auth-file={directory / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--profiling=false",
            *self._gates(),
            *self.api_server_options,
        )
        self._wait_until("the API server's certificate", self._certificate.exists)

    def wait_ready(self) -> None:
        """Until the API server says that it is ready."""
        self._wait_until("the API server", self._is_ready)

    def stop_process(self, name: str, hard: bool = False) -> None:
        """End one process by its id and wait for it."""
        process = self.processes.pop(name)
        if hard:
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=_STOP_SECONDS)

    def stop(self) -> None:
        """End everything, in the order in which the parts need each other."""
        for name in list(reversed(self.processes)):
            # Nothing here is kept, so nothing needs a graceful end.
            self.stop_process(name, hard=True)

    def log(self, name: str, last_bytes: int = 3000) -> str:
        """The end of a process's log."""
        file = self.directory / "logs" / f"{name}.log"
        return file.read_text(errors="replace")[-last_bytes:] if file.exists() else ""

    @property
    def serving_certificate(self) -> tuple[Path, Path]:
        """The API server's certificate and its key, for whoever else serves on this machine."""
        return self._certificate, self._certificate.with_suffix(".key")

    @property
    def _on_loopback(self) -> bool:
        return self.address == _LOOPBACK

    @property
    def _certificate(self) -> Path:
        return self.directory / "certificates" / "apiserver.crt"

    def _start_etcd(self) -> None:
        client_url, peer_url = (f"http://127.0.0.1:{port}" for port in (self.etcd_port, free_port()))
        self._spawn(
            "etcd",
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )

    def _start_controllers(self) -> None:
        self._spawn(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig('system:kube-controller-manager')}",
            "--leader-elect=false",
            "--secure-port=0",
            f"--service-account-private-key-file={self.directory / 'service-account.key'}",
            f"--root-ca-file={self._certificate}",
            "--use-service-account-credentials=true",
            *(self._loopback_controllers() if self._on_loopback else ()),
            "--horizontal-pod-autoscaler-sync-period=1s",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            *self._gates(),
        )
        self._spawn(
            "kube-scheduler",
            f"--kubeconfig={self.kubeconfig('system:kube-scheduler')}",
            "--leader-elect=false",
            "--secure-port=0",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            *self._gates(),
        )

    def _gates(self) -> tuple[str, ...]:
        named = ",".join(f"{name}=true" for name in self.feature_gates)
        return (f"--feature-gates={named}",) if named else ()

    def _address_options(self) -> tuple[str, ...]:
        if self._on_loopback:
            return ("--endpoint-reconciler-type=none",)
        return ("--kubelet-preferred-address-types=InternalIP",)

    @staticmethod
    def _loopback_controllers() -> tuple[str, ...]:
        return (
            f"--controllers=*,{','.join('-' + name for name in _WITHOUT_CONTROLLERS)}",
            f"--node-monitor-grace-period={NODE_LOST_SECONDS}s",
            "--node-monitor-period=1s",
        )

    def _spawn(self, name: str, *arguments: str) -> None:
        log = self.directory / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        wrapper = (sys.executable, "-I", "-S", child_exec.__file__, str(os.getpid()))
        with log.open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [*wrapper, str(self.binaries / name), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
            )

    def _output(self, name: str) -> bytes:
        return subprocess.run([str(self.binaries / name)], capture_output=True, check=True, timeout=60).stdout

    def _wait_until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not holds():
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended with {process.returncode}:\n{self.log(name)}"
            logs = "\n".join(f"--- {name}\n{self.log(name, 1500)}" for name in self.processes)
            assert time.monotonic() < deadline, f"no {what} within {_START_SECONDS:g} s:\n{logs}"
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with self.client() as client:
                return client.get("/readyz").status_code == 200
        except (httpx.TransportError, OSError):
            return False

    def _has_default_service_account(self) -> bool:
        with self.client() as client:
            return client.get("/api/v1/namespaces/default/serviceaccounts/default").status_code == 200


@contextmanager
def running_control_plane(
    directory: Path, binaries: Path, *api_server_options: str, feature_gates: tuple[str, ...] = ()
) -> Iterator[ControlPlane]:
    """A control plane for the length of the block."""
    plane = ControlPlane(directory, binaries, api_server_options=api_server_options, feature_gates=feature_gates)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()
