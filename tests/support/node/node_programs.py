"""The programs of a real Kubernetes node, each as its own project makes it: built from Go modules, or Debian's.

kubelet and kube-proxy come from the module that the control plane is built from, CoreDNS from its own module by a
pinned version, containerd, runc and the CNI plugins from Debian's packages, which are unpacked and not installed: no
service of theirs is ever set up on this machine. All is kept in the user's cache.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cluster.control_plane_binary import NODE, PAUSE, BuildError, built

CACHE_VARIABLE: Final = "STAGELINE_NODE_CACHE"
_COREDNS: Final = "v1.13.1"
_PACKAGES: Final = ("containerd", "runc", "containernetworking-plugins")
_BUILD_SECONDS: Final = 1800.0


@dataclass(frozen=True)
class NodePrograms:
    """Where each is. `debian` is the root that Debian's packages were unpacked under."""

    kubelet: Path
    kube_proxy: Path
    coredns: Path
    pause: Path
    debian: Path

    @property
    def containerd(self) -> Path:
        """The container runtime."""
        return self.debian / "usr" / "bin" / "containerd"

    @property
    def ctr(self) -> Path:
        """containerd's own client."""
        return self.debian / "usr" / "bin" / "ctr"

    @property
    def cni_plugins(self) -> Path:
        """Directory of the network plugins."""
        return self.debian / "usr" / "lib" / "cni"

    @property
    def path(self) -> str:
        """PATH for what runs containers: containerd looks for its shim and for runc there."""
        own = (self.debian / folder for folder in ("usr/bin", "usr/sbin"))
        return os.pathsep.join([*map(str, own), os.environ.get("PATH", os.defpath)])


def node_cache() -> Path:
    """Directory that everything of a node is kept in between runs."""
    root = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "stageline-node")
    root.mkdir(parents=True, exist_ok=True)
    return root


def node_programs() -> NodePrograms:
    """All of them, built and unpacked if need be; needs Go and the network once. Raises `BuildError`."""
    node = built(NODE)
    return NodePrograms(
        kubelet=node / "kubelet",
        kube_proxy=node / "kube-proxy",
        coredns=_coredns(),
        pause=built(PAUSE) / PAUSE.name,
        debian=_unpacked_packages(),
    )


def _coredns() -> Path:
    folder = node_cache() / f"coredns-{_COREDNS}"
    if not (folder / "coredns").exists():
        draft = folder.with_suffix(".draft")
        environment = {**os.environ, "GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOBIN": str(draft)}
        module = f"github.com/coredns/coredns@{_COREDNS}"
        _run(["go", "install", "-trimpath", "-ldflags", "-s -w", module], environment, node_cache())
        draft.replace(folder)
    return folder / "coredns"


def _unpacked_packages() -> Path:
    root = node_cache() / "debian"
    if not root.is_dir():
        draft = root.with_suffix(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        # As root, apt would download as a user of its own, who can't write here.
        _run(["apt-get", "-o", "APT::Sandbox::User=root", "download", *_PACKAGES], dict(os.environ), draft)
        for package in draft.glob("*.deb"):
            _run(["dpkg-deb", "-x", package.name, "."], dict(os.environ), draft)
            package.unlink()
        draft.replace(root)
    return root


def _run(command: list[str], environment: dict[str, str], directory: Path) -> None:
    sys.stderr.write(f"a node's programs: {' '.join(command)}\n")
    done = subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, check=False, timeout=_BUILD_SECONDS
    )
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")


if __name__ == "__main__":
    try:
        node_programs()
    except BuildError as error:
        sys.exit(f"a node's programs: {error}")
