"""The cluster that `make test-cluster` runs against: an own control plane, or the one that KUBECONFIG names.

Against a foreign cluster (`KUBECONFIG` and `STAGELINE_E2E_CLUSTER=1`) nothing is started but `kubectl proxy`, through
which everything goes, so that any way to log in works. Nodes whose pods run nothing are made there too; a test that
needs more than that is skipped by the fixture that it asks for, which says what.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from cluster.api import ClusterApi
from cluster.control_plane import ControlPlane, running_control_plane
from cluster.control_plane_binary import control_plane_binaries, kubernetes_version
from cluster.kubeconfig_file import write_kubeconfig

FOREIGN_VARIABLE: Final = "STAGELINE_E2E_CLUSTER"
_FIRST_WITH_GANGS: Final = 37
"""Minor version of Kubernetes whose PodGroups are `v1beta1`."""
_KUBECTL_SECONDS: Final = 400.0
"""Longer than any `--timeout` that a test gives it, so that its own words say what it waited for."""


@dataclass
class Cluster:
    """`kubeconfig` may do everything. `direct_kubeconfig` says where the API server itself is, past any proxy.

    `plane` is None when the cluster is not ours.
    """

    kubeconfig: Path
    direct_kubeconfig: Path
    kubectl_command: str
    connect: Callable[[], httpx.Client]
    """A new HTTP client that may do everything."""
    api: ClusterApi
    plane: ControlPlane | None

    def service_account_kubeconfig(self, namespace: str, name: str, directory: Path) -> Path:
        """A kubeconfig in `directory` with exactly the rights of a ServiceAccount, by a token of an hour."""
        view = ["config", "view", "--raw", "--minify", "--flatten", "-o", "json"]
        found = subprocess.run(
            [self.kubectl_command, "--kubeconfig", str(self.direct_kubeconfig), *view],
            capture_output=True,
            check=True,
            timeout=_KUBECTL_SECONDS,
        )
        token = self.kubectl_ok("create", "token", name, "-n", namespace, "--duration=1h").strip()
        file = directory / "kubeconfigs" / f"sa-{namespace}-{name}.yaml"
        write_kubeconfig(file, json.loads(found.stdout)["clusters"][0]["cluster"], name, token, namespace)
        return file

    def kubectl(self, *arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        """Run kubectl; the caller looks at its status."""
        return subprocess.run(
            [self.kubectl_command, "--kubeconfig", str(self.kubeconfig), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=_KUBECTL_SECONDS,
        )

    def kubectl_ok(self, *arguments: str, stdin: str = "") -> str:
        """Run kubectl and return its output; a failure shows its words."""
        done = self.kubectl(*arguments, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def apply(self, *manifests: dict[str, Any]) -> None:
        """`kubectl apply` of manifests."""
        self.kubectl_ok("apply", "-f", "-", stdin=yaml.safe_dump_all(manifests))


def uses_foreign_cluster() -> bool:
    """Whether a person has named a cluster of theirs."""
    return os.environ.get(FOREIGN_VARIABLE) == "1" and bool(os.environ.get("KUBECONFIG"))


@contextmanager
def own_cluster(directory: Path) -> Iterator[Cluster]:
    """A control plane of our own; see `control_plane`."""
    with running_control_plane(directory, control_plane_binaries()) as plane, cluster_of(plane) as cluster:
        yield cluster


@contextmanager
def own_cluster_with_gangs(directory: Path) -> Iterator[Cluster]:
    """A control plane of our own whose scheduler places whole groups, by Kubernetes' own API."""
    if int(kubernetes_version().split(".")[1]) < _FIRST_WITH_GANGS:
        pytest.skip(f"Kubernetes {kubernetes_version()} has no PodGroups of v1beta1")
    option = "--runtime-config=scheduling.k8s.io/v1beta1=true"
    running = running_control_plane(directory, control_plane_binaries(), option, feature_gates=("GenericWorkload",))
    with running as plane, cluster_of(plane) as cluster:
        yield cluster


@contextmanager
def cluster_of(plane: ControlPlane) -> Iterator[Cluster]:
    """A running control plane of our own."""
    with plane.client() as client:
        admin = plane.admin_kubeconfig
        yield Cluster(admin, admin, str(plane.kubectl), plane.client, ClusterApi(client), plane)


@contextmanager
def foreign_cluster(directory: Path) -> Iterator[Cluster]:
    """The cluster of KUBECONFIG, through `kubectl proxy`."""
    kubectl = shutil.which("kubectl")
    assert kubectl is not None, f"{FOREIGN_VARIABLE}=1 needs kubectl on PATH"
    kubeconfig = Path(os.environ["KUBECONFIG"])
    command = [kubectl, "--kubeconfig", str(kubeconfig), "proxy", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        try:
            found = re.search(r"127\.0\.0\.1:\d+", proxy.stdout.readline())
            assert found is not None, "kubectl proxy does not start"
            url, proxied = f"http://{found[0]}", directory / "proxied.yaml"
            write_kubeconfig(proxied, {"server": url}, "proxied")

            def connect() -> httpx.Client:
                return httpx.Client(base_url=url, timeout=30, trust_env=False)

            with connect() as client:
                yield Cluster(proxied, kubeconfig, kubectl, connect, ClusterApi(client), None)
        finally:
            proxy.terminate()


def column_of(table: str, column: str) -> str:
    """One cell of the first row of a `kubectl get` table, by its heading."""
    heading, row = table.splitlines()[:2]
    start = heading.index(column)
    end = re.compile(r"\S+\s*").match(heading, start)
    assert end is not None
    return row[start : end.end()].strip()


def to_json(value: Any) -> str:
    """For failure messages."""
    return json.dumps(value, indent=1, default=str)
