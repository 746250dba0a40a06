"""Builds Kubernetes and etcd from Go modules, once for each pinned version, into the user's cache.

The control plane's commands are one program (see `tests/cluster/controlplane/main.go`), and a node's are another; a
link for each command stands beside it. The cache's key covers everything that the build reads, and an entry is
published by one rename, so a build that was cut short leaves nothing that looks whole. Two builds at once wait for each
other.
"""

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODULE_DIR: Final = Path(__file__).parents[2] / "cluster" / "controlplane"


@dataclass(frozen=True)
class Program:
    """One program of the module: `folder` has its `main.go`; it is called by the names of `commands`."""

    name: str
    folder: str
    commands: tuple[str, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """What the build reads, but for the modules that go.sum names."""
        return (f"{self.folder}/main.go", "go.mod", "go.sum")


CONTROL_PLANE: Final = Program(
    "controlplane",
    ".",
    ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "service-account-key"),
)
NODE: Final = Program("node", "./node", ("kubelet", "kube-proxy"))
PAUSE: Final = Program("pause", "./pause", ())
"""The container that holds a pod's namespaces; a program of its own, since one runs for every pod."""
CACHE_VARIABLE: Final = "STAGELINE_CONTROL_PLANE_CACHE"
_BUILD_SECONDS: Final = 1800.0
_REPORT_SECONDS: Final = 15.0
_VERSION_PACKAGE: Final = "k8s.io/component-base/version"


class BuildError(Exception):
    """The control plane can't be built here; the message is for a person."""


def kubernetes_version() -> str:
    """The pinned version, as in `v1.35.4`."""
    return _required_match(r"^\tk8s\.io/kubernetes (v\S+)$")


def control_plane_binaries() -> Path:
    """Directory with the control plane's commands, built if need be. Raises `BuildError`."""
    return built(CONTROL_PLANE)


def built(program: Program) -> Path:
    """Directory with the program and a link for each of its commands, built if need be. Raises `BuildError`."""
    _check_go()
    root = Path(os.environ.get(CACHE_VARIABLE) or _user_cache() / "stageline-control-plane")
    root.mkdir(parents=True, exist_ok=True)
    entry = root / f"{kubernetes_version()}-{_key(program)}"
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not entry.is_dir():
            _build(program, entry)
    return entry


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _required_match(pattern: str) -> str:
    match = re.search(pattern, (MODULE_DIR / "go.mod").read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise BuildError(f"go.mod in {MODULE_DIR} has no line like {pattern!r}")
    return match[1]


def _check_go() -> None:
    """Raise `BuildError` when there is no Go that is new enough; a toolchain is never downloaded."""
    if shutil.which("go") is None:
        raise BuildError("Go is not installed: the control plane is built from Go modules")
    found = _go("env", "GOVERSION")
    wanted = _required_match(r"^go (\S+)$")
    if _version_numbers(found) < _version_numbers(wanted):
        raise BuildError(f"Go {wanted} or newer is needed to build Kubernetes {kubernetes_version()}; this is {found}")


def _version_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def _go(*arguments: str) -> str:
    done = subprocess.run(
        ["go", *arguments], capture_output=True, text=True, check=False, timeout=60, cwd=MODULE_DIR, env=_environment()
    )
    if done.returncode != 0:
        raise BuildError(f"go {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def _environment() -> dict[str, str]:
    return {**os.environ, "GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOWORK": "off"}


def _flags() -> list[str]:
    version = kubernetes_version()
    _, major, minor, _ = re.split(r"[v.]", version, maxsplit=3)
    named = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    definitions = " ".join(f"-X {_VERSION_PACKAGE}.{name}={value}" for name, value in named.items())
    return ["-mod=readonly", "-p", "2", "-trimpath", "-ldflags", f"-s -w {definitions}"]


def _key(program: Program) -> str:
    digest = hashlib.sha256()
    for name in program.sources:
        digest.update((MODULE_DIR / name).read_bytes())
    digest.update("\0".join([_go("env", "GOVERSION"), *_flags()]).encode())
    return digest.hexdigest()[:16]


def _build(program: Program, entry: Path) -> None:
    draft = entry.with_name(f"{entry.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    started = time.monotonic()
    version = kubernetes_version()
    _say(f"building the {program.name} of Kubernetes {version} from Go modules into {entry} (once; some minutes)")
    _compile(program, draft / program.name)
    for name in program.commands:
        (draft / name).symlink_to(program.name)
    draft.rename(entry)
    _say(f"built in {time.monotonic() - started:.0f} s")


def _compile(program: Program, output: Path) -> None:
    command = ["go", "build", "-v", *_flags(), "-o", str(output), program.folder]
    process = subprocess.Popen(
        command, cwd=MODULE_DIR, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    timer = threading.Timer(_BUILD_SECONDS, process.kill)
    timer.start()
    try:
        last_lines = _follow(process)
    finally:
        timer.cancel()
        process.kill()
    status = process.wait()
    if status == -signal.SIGKILL:
        raise BuildError(
            f"go build was ended after {_BUILD_SECONDS:g} s, or by somebody; Go keeps what is compiled, so that the "
            "next try goes on from there"
        )
    if status != 0:
        raise BuildError(f"go build failed (status {status}):\n" + "\n".join(last_lines))


def _follow(process: "subprocess.Popen[str]") -> list[str]:
    """Tell how far the build is, now and then; returns the last lines of its output."""
    assert process.stdout is not None
    last_lines: list[str] = []
    packages, reported = 0, time.monotonic()
    for line in process.stdout:
        last_lines = [*last_lines[-30:], line.rstrip()]
        packages += not line.startswith(("go:", "#"))
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            _say(f"{packages} packages compiled")
    return last_lines


def _say(sentence: str) -> None:
    sys.stderr.write(f"control plane: {sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{control_plane_binaries()}\n")
    except BuildError as error:
        sys.exit(f"control plane: {error}")
