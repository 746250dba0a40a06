"""One real node: containerd with runc and a bridge of its own, and a kubelet that has joined the control plane.

Several nodes live in one network namespace, each with its own bridge, ports, cgroup, store of images and directories,
so that pods of two nodes reach each other over the kernel's routes, as over a cluster's. What is started is ended with
the test process at the latest, and with it, by its PID namespace, every container.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from node.node_programs import NodePrograms, node_cache
from stageline_local.node import child_exec

PAUSE_IMAGE: Final = "localhost/pause:1"
_KUBELET_PORT: Final = 10250
_STOP_SECONDS: Final = 60.0
_DEVICES: Final = ("aufs", "btrfs", "devmapper", "zfs")
_CGROUPS: Final = Path("/sys/fs/cgroup")


@dataclass
class RealNode:
    """The `number`th node, with the subnet `10.(88 + number).0.0/16`; `directory` holds what one run writes."""

    number: int
    directory: Path
    programs: NodePrograms
    kubeconfig: Path
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The node's name in the cluster."""
        return f"node-{self.number}"

    @property
    def address(self) -> str:
        """Of the node, which is its bridge's."""
        return f"10.{88 + self.number}.0.1"

    @property
    def store(self) -> Path:
        """containerd's root: images are kept from run to run."""
        return node_cache() / f"containerd-{self.number}"

    @property
    def socket(self) -> Path:
        """containerd's. In a short path, as addresses of sockets must be."""
        return Path(f"/run/stageline-{self.name}.sock")

    @property
    def cgroup(self) -> str:
        """Under which the node's pods run, in every controller."""
        return f"/stageline-{self.name}"

    def start(self) -> None:
        """Everything, until containerd answers; the kubelet registers the node soon after."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._make_cgroups()
        self.start_containerd()
        self.start_kubelet()

    def start_containerd(self) -> None:
        """Start the container runtime without what an earlier run has left, and wait until it answers."""
        # Of the pods of an earlier run nothing lives but what is written down.
        for left in ("io.containerd.grpc.v1.cri", "io.containerd.runtime.v2.task"):
            shutil.rmtree(self.store / left, ignore_errors=True)
        config = self.directory / "containerd.toml"
        config.write_text(self._containerd_config(), encoding="utf-8")
        self._spawn("containerd", self.programs.containerd, f"--config={config}")
        self._wait_until_containerd_answers()
        containers = self.ctr("containers", "list", "--quiet").split()
        if containers:
            self.ctr("containers", "delete", *containers)

    def start_kubelet(self) -> None:
        """Start the kubelet alone, as after it was stopped."""
        config = self.directory / "kubelet.yaml"
        config.write_text(yaml.safe_dump(self._kubelet_config()), encoding="utf-8")
        self._spawn(
            "kubelet",
            self.programs.kubelet,
            f"--config={config}",
            f"--kubeconfig={self.kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            f"--root-dir={self.directory / 'kubelet'}",
        )

    def stop(self, name: str) -> None:
        """End `kubelet` or `containerd`; containers run on."""
        process = self.processes.pop(name)
        process.terminate()
        try:
            process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=_STOP_SECONDS)

    def ctr(self, *arguments: str) -> str:
        """Run containerd's client in the namespace that kubelets use; a failure shows its words."""
        command = [str(self.programs.ctr), "--address", str(self.socket), "--namespace", "k8s.io", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=600, env=self._environment()
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}\n{self.log('containerd')}"
        return done.stdout

    def kill_container(self, pod: dict[str, Any], container: str) -> None:
        """SIGKILL to the first process of a container, by the id that the pod's status names."""
        statuses = pod["status"]["containerStatuses"] + pod["status"].get("initContainerStatuses", [])
        (container_id,) = [each["containerID"].split("//")[1] for each in statuses if each["name"] == container]
        self.ctr("tasks", "kill", "--signal", "SIGKILL", container_id)

    def log(self, name: str, last_bytes: int = 3000) -> str:
        """The end of a process's log."""
        file = self.directory / f"{name}.log"
        return file.read_text(errors="replace")[-last_bytes:] if file.exists() else ""

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": self.programs.path}

    def _spawn(self, name: str, program: Path, *arguments: str) -> None:
        wrapper = (sys.executable, "-I", "-S", child_exec.__file__, str(os.getpid()))
        with (self.directory / f"{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [*wrapper, str(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
                env=self._environment(),
            )

    def _wait_until_containerd_answers(self) -> None:
        deadline = time.monotonic() + 60
        command = [str(self.programs.ctr), "--address", str(self.socket), "version"]
        while subprocess.run(command, capture_output=True, check=False, timeout=60).returncode != 0:
            assert self.processes["containerd"].poll() is None, self.log("containerd")
            assert time.monotonic() < deadline, f"containerd does not answer:\n{self.log('containerd')}"
            time.sleep(0.1)

    def _make_cgroups(self) -> None:
        for controller in _CGROUPS.iterdir():
            if not (controller / "cgroup.procs").exists() or controller.is_symlink():
                continue
            own = controller / self.cgroup.lstrip("/")
            own.mkdir(exist_ok=True)
            # Empty in a new cgroup of version 1, and nothing can run in it before they are given.
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (own / name).exists():
                    (own / name).write_text((controller / name).read_text())

    def _containerd_config(self) -> str:
        """Its TOML: the subset that JSON values make."""
        cri = "plugins.'io.containerd.grpc.v1.cri'"
        tables: dict[str, dict[str, Any]] = {
            "": {
                "version": 2,
                "root": str(self.store),
                "state": str(self.directory / "containerd"),
                "disabled_plugins": [f"io.containerd.snapshotter.v1.{each}" for each in _DEVICES],
            },
            "grpc": {"address": str(self.socket)},
            cri: {
                "sandbox_image": PAUSE_IMAGE,
                "stream_server_address": "127.0.0.1",
                "restrict_oom_score_adj": True,
                "disable_apparmor": True,
                "netns_mounts_under_state_dir": True,
            },
            f"{cri}.cni": {"bin_dir": str(self.programs.cni_plugins), "conf_dir": str(self._network_config())},
            f"{cri}.containerd": {"default_runtime_name": "runc", "snapshotter": "overlayfs"},
            f"{cri}.containerd.runtimes.runc": {"runtime_type": "io.containerd.runc.v2"},
            f"{cri}.containerd.runtimes.runc.options": {"SystemdCgroup": False},
        }
        parts = []
        for title, values in tables.items():
            parts += [f"[{title}]"] if title else []
            parts += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        return "\n".join([*parts, ""])

    def _network_config(self) -> Path:
        folder = self.directory / "cni"
        folder.mkdir(exist_ok=True)
        subnet = {"subnet": f"10.{88 + self.number}.0.0/16", "rangeStart": f"10.{88 + self.number}.1.1"}
        plugin = {
            "type": "bridge",
            "bridge": f"cni{self.number}",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "dataDir": str(self.directory / "addresses"),
                "ranges": [[{**subnet, "gateway": self.address}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        config = {"cniVersion": "0.4.0", "name": self.name, "plugins": [plugin]}
        (folder / "10-bridge.conflist").write_text(json.dumps(config), encoding="utf-8")
        return folder

    def _kubelet_config(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "port": _KUBELET_PORT,
            "healthzPort": 0,
            # Nobody but this network namespace reaches it.
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.cgroup,
            "enforceNodeAllocatable": ["pods"],
            "oomScoreAdj": 0,
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "clusterDNS": [self.address],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "podLogsDir": str(self.directory / "pod-logs"),
            # The disk is a developer's, and images stay from run to run.
            "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "volumePluginDir": str(self.directory / "volume-plugins"),
        }
