"""`stageline operator` from a shell: help, refused flags, and what it says when there is no cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).parent / "stageline")


def operator(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "STAGELINE", "POD_"))}
    return subprocess.run(
        [COMMAND, "operator", *arguments],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_help_names_every_flag() -> None:
    done = operator("--help")
    assert done.returncode == 0, done.stderr
    for flag in ("--namespace", "--kubeconfig", "--leader-elect", "--metrics-port", "--log-format", "--image"):
        assert flag in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--image", "i", "--namespace", "a,B_c"), '"B_c" is not the name of a namespace'),
        (("--image", "i", "--metrics-port", "99999"), "--metrics-port"),
        (("--image", "i", "--log-format", "xml"), "--log-format"),
        (("--image", "i", "--metrics-from", "prometheus"), "can't be read as JSON"),
        (("--image", "i", "--metrics-from", '{"podSelector": {}}'), "must be a list of NetworkPolicy peers"),
        (("--image", "i", "--metrics-from", '[{"pods": {}}]'), '{"pods": {}} is no NetworkPolicy peer'),
        (("--image", "i", "--gateway-url", "http://gateway/v1"), '"http://gateway/v1" is not NAMESPACE=URL'),
        (("--image", "i", "--tracing-env", "HOME=/"), '"HOME=/" is not OTEL_NAME=VALUE'),
        (("--image", "i", "--kubeconfig", "/nowhere/config"), "/nowhere/config"),
        ((), "--image"),
    ],
    ids=[
        "namespace",
        "port",
        "log-format",
        "json",
        "peers",
        "peer",
        "gateway-url",
        "tracing-env",
        "kubeconfig",
        "no-image",
    ],
)
def test_a_bad_flag_is_refused_by_name(arguments: tuple[str, ...], words: str) -> None:
    done = operator(*arguments)
    assert done.returncode == 2, done
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreadable_kubeconfig_and_no_cluster_are_said_in_a_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "config"
    broken.write_text("clusters: [")
    for done in (
        operator("--image", "i", "--kubeconfig", str(broken)),
        operator("--image", "i", HOME=str(tmp_path)),
    ):
        assert done.returncode == 2, done
        assert "can't log in to a cluster" in done.stderr
        assert "Traceback" not in done.stderr
