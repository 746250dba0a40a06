"""What many models cost the operator, on a real control plane: `make bench-operator`.

First, unless `--recoveries 0`: how long a group of the real runtime takes from the death of a stage to Ready. Then many
PipelineModels of two stages, whose pods a kubelet that runs nothing calls ready at once: the seconds until all models
are Ready, the operator's memory, its API calls per model (from the API server's audit log: every call but watches and
the lease), and its calls per minute once all is quiet. Last, unless `--large 0`, the same for one model of as many
groups of as many stages, with the bytes of its status.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.api import ClusterApi, wait_until
from cluster.control_plane import running_control_plane
from cluster.control_plane_binary import control_plane_binaries, kubernetes_version
from cluster.counting_kubelet import CountingKubelet
from cluster.kubelet.api_access import read_kubeconfig
from cluster.model_in_cluster import ModelInCluster, small_model
from cluster.operator_process import ACCOUNT, NAMESPACE, OperatorProcess
from cluster.simulated_nodes import SimulatedNodes
from cluster.under_test import Cluster, cluster_of
from oracles.tiny_models import write_tiny_llama
from processes.serving_command import kill
from stageline_bench.page_section import replace_section
from stageline_bench.runtime.record.results import Machine, Result, Target, this_machine, today, write_result

ROOT = Path(__file__).parents[3]
CRD_FILE = ROOT / "operator" / "stageline_api" / "crds" / "stageline.dev_pipelinemodels.yaml"
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}
PODS_PER_NODE = 250
READY_SECONDS = 900.0
CREATED_AT_ONCE = 8


@contextmanager
def cluster_with_audit(directory: Path) -> Iterator[tuple[Cluster, Path]]:
    policy, log = directory / "audit-policy.json", directory / "audit.log"
    policy.write_text(json.dumps(AUDIT_POLICY))
    options = (f"--audit-policy-file={policy}", f"--audit-log-path={log}")
    with (
        running_control_plane(directory / "plane", control_plane_binaries(), *options) as plane,
        cluster_of(plane) as cluster,
    ):
        cluster.kubectl_ok("apply", "--server-side", "-f", str(CRD_FILE))
        cluster.kubectl_ok("wait", "--for=condition=Established", "--timeout=60s", "-f", str(CRD_FILE))
        yield cluster, log


def operator_calls(log: Path) -> Counter[str]:
    """The operator's calls so far by verb and resource, less watches and leases."""
    user, counted = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}", Counter[str]()
    for line in log.read_text(encoding="utf-8").splitlines():
        call = json.loads(line)
        resource = call.get("objectRef", {}).get("resource", "")
        if call["user"]["username"] == user and call["verb"] != "watch" and resource != "leases":
            part = call["objectRef"].get("subresource") if "objectRef" in call else None
            counted[f"{call['verb']} {resource}{'/' + part if part else ''}"] += 1
    return counted


def memory_bytes(pid: int, field: str = "VmRSS") -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def model_manifest(index: int, stages: int = 2, groups: int = 1) -> dict[str, Any]:
    return {
        "apiVersion": "stageline.dev/v1alpha1",
        "kind": "PipelineModel",
        "metadata": {"name": f"m-{index}", "namespace": "default"},
        "spec": {"model": {"source": "hf://org/name"}, "parallelism": {"pipeline": stages}, "replicas": groups},
    }


def ready_models(api: ClusterApi) -> int:
    return sum(
        any(c["type"] == "Ready" and c["status"] == "True" for c in model.get("status", {}).get("conditions", []))
        for model in api.list("PipelineModel", "default")
    )


def made_ready(
    cluster: Cluster, log: Path, operator: OperatorProcess, manifests: list[dict[str, Any]], quiet_seconds: float
) -> dict[str, Any]:
    """Create the models, wait until all are Ready, then watch what goes on when nothing happens."""
    count = len(manifests)
    before, memory_before = operator_calls(log), memory_bytes(operator.pid)
    started = time.monotonic()
    with ThreadPoolExecutor(CREATED_AT_ONCE) as pool:
        answers = list(pool.map(lambda each: cluster.api.create("PipelineModel", each, "default"), manifests))
    assert all(answer.status_code == 201 for answer in answers), [a.text for a in answers if a.status_code != 201][:1]
    created_seconds = time.monotonic() - started
    wait_until("all models are Ready", lambda: ready_models(cluster.api) == count, READY_SECONDS, operator.log_end)
    ready_seconds = time.monotonic() - started
    say(f"{count} models created in {created_seconds:.1f} s, all Ready after {ready_seconds:.1f} s")
    time.sleep(quiet_seconds / 4)
    calls = operator_calls(log) - before
    settled = operator_calls(log)
    time.sleep(quiet_seconds)
    quiet = operator_calls(log) - settled
    return {
        "models": count,
        "created_seconds": round(created_seconds, 2),
        "all_ready_seconds": round(ready_seconds, 2),
        "calls_per_model": round(sum(calls.values()) / count, 2),
        "calls": dict(calls.most_common()),
        "quiet_calls_per_minute": round(sum(quiet.values()) * 60 / quiet_seconds, 1),
        "quiet_calls": dict(quiet.most_common()),
        "operator_memory_bytes": memory_bytes(operator.pid),
        "operator_peak_memory_bytes": memory_bytes(operator.pid, "VmHWM"),
        "operator_memory_before_bytes": memory_before,
        "largest_status_bytes": max(
            len(json.dumps(model["status"])) for model in cluster.api.list("PipelineModel", "default")
        ),
    }


def recoveries(cluster: Cluster, directory: Path, repetitions: int) -> list[float]:
    """Seconds from the death of a stage of the real runtime to Ready under the next incarnation."""
    assert cluster.plane is not None
    nodes = SimulatedNodes(cluster.plane, cluster, directory / "nodes")
    try:
        for name in ("node-a", "node-b"):
            nodes.add(name)
        nodes.recover()
        model = small_model(cluster, "default", write_tiny_llama(directory / "llama"), nodes)
        # A window of a second, so that every restart is a first one: the back-off is not what is measured.
        model.apply(restart={"backoffSeconds": 1, "windowSeconds": 1})
        model.until_ready()
        return [recovery(model, repetition % 2) for repetition in range(repetitions)]
    finally:
        nodes.stop()


def recovery(model: ModelInCluster, stage: int) -> float:
    before, pid = model.incarnation(), model.container_pid(stage, "stage")
    started = time.monotonic()
    kill(pid)
    model.until_incarnation(before)
    seconds = time.monotonic() - started
    say(f"stage {stage} killed, Ready again after {seconds:.2f} s")
    return round(seconds, 3)


def say(sentence: str) -> None:
    sys.stdout.write(sentence + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--large", type=int, default=64, help="stages, and groups, of one large model")
    parser.add_argument("--quiet-seconds", type=float, default=60.0)
    parser.add_argument("--recoveries", type=int, default=10)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--page", type=Path, help="page whose operator section is written anew")
    options = parser.parse_args()
    machine = this_machine()
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-operator-") as text:
        for part in ("recoveries", "models", *(["large"] if options.large else [])):
            directory = Path(text) / part
            directory.mkdir()
            with cluster_with_audit(directory) as (cluster, log):
                assert cluster.plane is not None
                operator = OperatorProcess(cluster, directory / "operator")
                operator.start()
                try:
                    if part != "recoveries":
                        large = model_manifest(0, options.large, options.large)
                        manifests = [large] if part == "large" else list(map(model_manifest, range(options.models)))
                        pods = options.large**2 if part == "large" else 2 * options.models
                        nodes = -(-pods // PODS_PER_NODE) + 1
                        with CountingKubelet(read_kubeconfig(cluster.plane.admin_kubeconfig), nodes):
                            found = made_ready(cluster, log, operator, manifests, options.quiet_seconds)
                        rounds.append({"part": part, "pods": pods} | found)
                    elif options.recoveries:
                        rounds.append({"recovery_seconds": recoveries(cluster, directory, options.recoveries)})
                finally:
                    operator.end()
    say(json.dumps(rounds, indent=1))
    result = result_of(options, machine, rounds)
    write_result(result, options.results)
    if options.page is not None:
        update_page(options.page, result)


def result_of(options: argparse.Namespace, machine: Machine, rounds: list[dict[str, Any]]) -> Result:
    scale = next(each for each in rounds if each.get("part") == "models")
    per_model = round(scale["all_ready_seconds"] / scale["models"], 4)
    targets = [
        # KubeRay's published 258 s for 1,000 clusters.
        Target(name="seconds until all are Ready, per model", measured=per_model, at_most=0.258),
        Target(name="API calls per minute once quiet", measured=scale["quiet_calls_per_minute"], at_most=10),
    ]
    parameters = {"models": options.models, "stages": 2, "large": options.large, "kubernetes": kubernetes_version()}
    return Result(
        program="operator", date=today(), machine=machine, parameters=parameters, rounds=rounds, targets=targets
    )


def update_page(page: Path, result: Result) -> None:
    """Replace the page's section between `<!-- begin operator -->` and its end."""
    scale = next(each for each in result.rounds if each.get("part") == "models")
    large = next((each for each in result.rounds if each.get("part") == "large"), None)
    recovery = result.rounds[0].get("recovery_seconds")
    mebibytes = 1024 * 1024
    rows = {
        f"{scale['models']} models created, s": scale["created_seconds"],
        "all Ready, s after the first was created": scale["all_ready_seconds"],
        "API calls per model": scale["calls_per_model"],
        "API calls per minute once quiet": scale["quiet_calls_per_minute"],
        "operator's memory before, MiB": round(scale["operator_memory_before_bytes"] / mebibytes),
        "operator's memory after, MiB": round(scale["operator_memory_bytes"] / mebibytes),
        "operator's highest memory, MiB": round(scale["operator_peak_memory_bytes"] / mebibytes),
    }
    if recovery:
        rows[f"stage killed to group Ready, s, median of {len(recovery)}"] = round(statistics.median(recovery), 2)
        rows["stage killed to group Ready, s, worst"] = round(max(recovery), 2)
    if large is not None:
        side = result.parameters["large"]
        rows |= {
            f"one model of {side} groups of {side} stages: Ready, s": large["all_ready_seconds"],
            "its API calls per pod": round(large["calls_per_model"] / large["pods"], 2),
            "operator's highest memory with it, MiB": round(large["operator_peak_memory_bytes"] / mebibytes),
            "its status, KiB": round(large["largest_status_bytes"] / 1024),
        }
    machine = result.machine
    lines = [
        f"{result.date}, {machine.cpu}, {machine.cores} cores, Kubernetes {result.parameters['kubernetes']}; "
        f"load average before {machine.load_average}.",
        "",
        "| What | Measured |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
    ]
    replace_section(page, "operator", "\n".join(lines))


if __name__ == "__main__":
    main()
