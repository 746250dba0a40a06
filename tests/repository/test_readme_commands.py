"""Every command of the README is one that a machine runs: here, in another test, or in `.ci/run`.

A command that this page doesn't know how to check fails the test, so nothing can be added to the README unchecked.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from processes.repository_files import ROOT, environment_outside_make
from stageline_api.resource.pipeline_model import PipelineModel

README = (ROOT / "README.md").read_text(encoding="utf-8")
STAGELINE = str(Path(sys.executable).parent / "stageline")
# What .ci/run makes; test_setup.py runs that script and sees each of them start.
MADE_BY_CI = {"up", "test", "check"}
# Made by test_setup.py.
MADE_BY_TESTS = {"help"}


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def shell_commands() -> list[list[str]]:
    """Each command of the `sh` blocks, split into words as a shell would; quotes may span lines."""
    commands = []
    for block in blocks("sh"):
        lines = shlex.shlex(block, posix=True, punctuation_chars="\n")
        lines.whitespace = " \t"
        lines.whitespace_split = True
        words: list[str] = []
        for token in [*lines, "\n"]:
            if token.strip("\n"):
                words.append(token)
            elif words:
                commands.append(words)
                words = []
    return commands


def stageline_commands() -> list[list[str]]:
    return [words[1:] for words in shell_commands() if words[0] == ".venv/bin/stageline"]


def test_the_readme_has_commands_of_each_kind() -> None:
    kinds = {"make", "curl", ".venv/bin/stageline", "helm", "kubectl", "REGISTRY=registry.example.com/team"}
    assert {words[0] for words in shell_commands()} == kinds
    assert len(blocks("sh")) == README.count("```sh")


def test_every_make_command_is_made_somewhere() -> None:
    made = [words[1:] for words in shell_commands() if words[0] == "make"]
    assert {tuple(words) for words in made} <= {(target,) for target in MADE_BY_CI | MADE_BY_TESTS}


@pytest.mark.parametrize("target", sorted(MADE_BY_CI | MADE_BY_TESTS))
def test_make_knows_the_target(target: str) -> None:
    command = ["make", "--dry-run", target]
    done = subprocess.run(
        command, cwd=ROOT, env=environment_outside_make(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", stageline_commands(), ids=" ".join)
def test_stageline_knows_the_command_and_its_options(words: list[str]) -> None:
    done = subprocess.run([STAGELINE, words[0], "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    unknown = [word for word in words if word.startswith("-") and not re.search(rf"{word}\b", done.stdout)]
    assert unknown == [], done.stdout


def test_every_file_that_a_command_names_is_valid() -> None:
    files = {word for words in stageline_commands() for word in words if word.endswith(".yaml")}
    assert files
    done = subprocess.run(
        [STAGELINE, "validate", *sorted(files)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_manifest_shown_is_the_example() -> None:
    (shown,) = blocks("yaml")
    example = (ROOT / "examples" / "smollm2.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(shown) == yaml.safe_load(example)
    assert PipelineModel.model_validate(yaml.safe_load(shown)).spec.parallelism.pipeline == 2


def test_curl_and_python_ask_the_same_of_the_example() -> None:
    (curl,) = [words for words in shell_commands() if words[0] == "curl"]
    body = json.loads(curl[curl.index("-d") + 1])
    (snippet,) = blocks("python")
    compile(snippet, "README.md", "exec")
    assert curl[1].removesuffix("/chat/completions") in snippet
    assert f'model="{body["model"]}"' in snippet
    assert body["messages"][0]["content"] in snippet
