"""kubectl itself finds the plugin by its name, and hands it what stands behind that name."""

import os
import subprocess
import sys
from pathlib import Path

from cluster.manifest_samples import manifest
from cluster.under_test import Cluster

_PROGRAM = "from stageline_cli.kubectl_plugin import main; main()"


def test_kubectl_runs_the_plugin_on_its_cluster(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    command = tmp_path / "kubectl-stageline"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{_PROGRAM}" "$@"\n')
    command.chmod(0o755)
    body = manifest(name="plugged")
    cluster.apply(body | {"metadata": body["metadata"] | {"namespace": namespace}})
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    where = ["--namespace", namespace, "--kubeconfig", str(cluster.kubeconfig)]
    done = subprocess.run(
        [cluster.kubectl_command, "stageline", "status", *where, "--exit-code"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PATH": path},
        check=False,
    )
    assert "plugged" in done.stdout, (done.stdout, done.stderr)
    assert done.returncode == 4, "nobody reconciles it, so it doesn't answer"
