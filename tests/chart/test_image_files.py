"""The Dockerfiles, as far as reading them goes: whom they run as, what they copy, where packages come from."""

import fnmatch
import json
import re
import tomllib
from pathlib import Path

import pytest

from processes.repository_files import ROOT, repository_files
from stageline_cli.main import cli

FILES = [path for path in repository_files() if path.name.startswith("Dockerfile")]
EACH = pytest.mark.parametrize("file", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
DEBIAN = re.compile(r"debian:\d+\.\d+-slim")


def instructions(file: Path) -> list[tuple[str, str]]:
    """(word, rest) of each instruction, continued lines joined."""
    text = re.sub(r"^#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def rests(file: Path, word: str) -> list[str]:
    """What follows each instruction of one kind."""
    return [rest for name, rest in instructions(file) if name == word]


def test_there_is_an_image_for_every_part() -> None:
    names = {str(path.relative_to(ROOT / "images")) for path in FILES}
    assert names == {"services/Dockerfile", "runtime/Dockerfile.cpu", "runtime/Dockerfile.cuda"}
    readme = (ROOT / "images" / "README.md").read_text(encoding="utf-8")
    assert "These files were never built." in readme
    assert all(name in readme for name in names)


@EACH
def test_the_last_stage_runs_as_a_numbered_user_who_is_not_root(file: Path) -> None:
    names = [name for name, _ in instructions(file)]
    assert names.count("FROM") == 2
    last = instructions(file)[len(names) - 1 - names[::-1].index("FROM") :]
    users = [rest for name, rest in last if name == "USER"]
    assert len(users) == 1
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[0]), users
    assert [name for name, _ in last][-2:] == ["USER", "ENTRYPOINT"]


@EACH
def test_everything_is_pinned_and_comes_from_debian_and_pypi(file: Path) -> None:
    text = "\n".join(f"{name} {rest}" for name, rest in instructions(file))
    assert all(DEBIAN.fullmatch(rest.split()[0]) for rest in rests(file, "FROM"))
    assert "latest" not in text
    assert not re.search(r"https?://|--(extra-)?index-url|curl|wget|git clone|ADD ", text)
    installs = re.findall(r"pip install (.*)", text)
    assert installs
    assert all("-c constraints.txt" in line for line in installs)


@EACH
def test_what_is_copied_exists_and_is_sent_to_the_builder(file: Path) -> None:
    sent = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for rest in rests(file, "COPY"):
        *words, _ = rest.split()
        if words[0].startswith("--from="):
            assert words[0] == "--from=build"
            continue
        for word in words:
            assert (ROOT / word).exists(), word
            assert any(fnmatch.fnmatch(word, line[1:]) for line in sent), f".dockerignore keeps {word} out"


@EACH
def test_the_package_and_its_licence_can_be_built_from_what_is_copied(file: Path) -> None:
    with (ROOT / "pyproject.toml").open("rb") as opened:
        project = tomllib.load(opened)
    copied = {word for rest in rests(file, "COPY") if "--from" not in rest for word in rest.split()[:-1]}
    folders = {path.split("/")[0] for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    wanted = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], *folders}
    assert wanted <= copied, wanted - copied
    assert extras_of(file) <= set(project["project"]["optional-dependencies"])


def extras_of(file: Path) -> set[str]:
    """The extras that are installed: as they stand, or what the file's own words say to build it with."""
    text = file.read_text(encoding="utf-8")
    (extras,) = re.findall(r'"\.\[(.+?)\]"', text)
    if not extras.startswith("${PART"):
        return set(extras.split(","))
    assert rests(file, "ARG") == ["PART"]
    parts = set(re.findall(r"^# .* --build-arg PART=(\w+) -t stageline-\1:", text, flags=re.MULTILINE))
    assert parts == {"operator", "gateway"}
    return parts


@EACH
def test_the_entry_point_is_a_command_that_exists(file: Path) -> None:
    (text,) = rests(file, "ENTRYPOINT")
    program, *command = json.loads(text)
    with (ROOT / "pyproject.toml").open("rb") as opened:
        assert program in tomllib.load(opened)["project"]["scripts"]
    assert set(command) <= set(cli.list_commands(cli.make_context("stageline", ["--help"], resilient_parsing=True)))
