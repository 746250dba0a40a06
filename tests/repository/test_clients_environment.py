"""The clients' environment says truly what is in it, and is no success without the clients that matter most.

The script is the real one; a stand-in for Python, and so for the package index, decides what installs.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALL = "openai anthropic litellm langchain-openai instructor lm-eval[api] transformers aiperf"
STAND_IN = """#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
case "$2" in
venv)
    echo "venv" >>"$LOG"
    mkdir -p "$3/bin"
    cp "$here/python" "$3/bin/python"
    ;;
pip)
    echo "$5" >>"$LOG"
    case " $ABSENT " in *" $5 "*) exit 1 ;; esac
    ;;
esac
"""


class Checkout:
    """The script in a directory of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "log"
        (root / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "clients-environment", root / "scripts")
        python = root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(STAND_IN)
        python.chmod(0o755)

    def make(self, absent: str = "") -> tuple[int, str, list[str]]:
        """Its exit status, its errors, and what it did."""
        self.log.write_text("")
        environment = {"PATH": "/usr/bin:/bin", "LOG": str(self.log), "ABSENT": absent}
        done = subprocess.run(
            ["sh", self.root / "scripts" / "clients-environment"],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr, self.log.read_text().split()

    @property
    def stamp(self) -> str:
        return (self.root / ".clients-venv" / ".made").read_text().strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_what_is_whole_is_made_once(checkout: Checkout) -> None:
    assert checkout.make() == (0, "", ["venv", *ALL.split()])
    assert checkout.stamp == ALL
    assert checkout.make() == (0, "", [])


def test_one_that_does_not_install_is_left_out_of_the_stamp_and_tried_again(checkout: Checkout) -> None:
    status, errors, _ = checkout.make(absent="litellm")
    assert (status, errors) == (0, "clients-environment: litellm does not install\n")
    assert checkout.stamp == ALL.replace("litellm ", "")
    status, errors, done = checkout.make()
    assert (status, errors, "venv" in done, "litellm" in done) == (0, "", False, True)
    assert checkout.stamp == ALL


@pytest.mark.parametrize("absent", ["openai", "anthropic", ALL])
def test_it_fails_without_the_clients_that_matter_most(checkout: Checkout, absent: str) -> None:
    status, errors, _ = checkout.make(absent=absent)
    assert status == 1, errors
    assert "nothing to check without" in errors
    assert checkout.stamp != ALL
    assert checkout.make()[0] == 0
