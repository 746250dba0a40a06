"""The environment of Node.js clients says truly what is in it, and its lack fails nothing.

The script is the real one; a stand-in for npm decides what installs.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = """#!/bin/sh
for package in "$@"; do :; done
echo "$package" >>"$LOG"
case " $ABSENT " in *" $package "*) exit 1 ;; esac
"""


class Checkout:
    """The script in a directory of its own."""

    def __init__(self, root: Path, tools: str) -> None:
        self.root = root
        self.log = root / "log"
        (root / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "node-clients-environment", root / "scripts")
        (root / "bin").mkdir()
        for tool in tools.split():
            (root / "bin" / tool).symlink_to(str(shutil.which(tool)))

    def add_npm(self) -> None:
        npm = self.root / "bin" / "npm"
        npm.write_text(STAND_IN)
        npm.chmod(0o755)

    def make(self, absent: str = "") -> tuple[int, str, list[str]]:
        """Its exit status, its errors, and what it installed."""
        self.log.write_text("")
        environment = {"PATH": str(self.root / "bin"), "LOG": str(self.log), "ABSENT": absent}
        done = subprocess.run(
            [str(shutil.which("sh")), self.root / "scripts" / "node-clients-environment"],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr, self.log.read_text().split()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path, "sh dirname mkdir cat")


def test_what_does_not_install_is_tried_again(checkout: Checkout) -> None:
    checkout.add_npm()
    status, errors, tried = checkout.make(absent="ai")
    assert (status, errors) == (0, "node-clients-environment: ai does not install\n")
    assert {"openai", "ai", "@openai/codex", "@anthropic-ai/claude-code"} <= set(tried)
    assert "ai" not in (checkout.root / ".clients-node" / ".made").read_text().split()
    assert checkout.make()[:2] == (0, "")
    assert checkout.make() == (0, "", [])


def test_without_npm_it_says_what_is_missing(checkout: Checkout) -> None:
    status, errors, tried = checkout.make()
    assert (status, tried) == (0, [])
    assert "npm is missing" in errors
    assert not (checkout.root / ".clients-node").exists()
