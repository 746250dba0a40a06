"""The Dockerfiles, as far as reading them goes: whom they run as, what they copy, where packages come from."""

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from processes.repository_files import ROOT, repository_files
from stageline_api.resource.pods.template import SecurityContextSpec
from stageline_cli.main import cli

FILES = [path for path in repository_files() if path.name.startswith("Dockerfile")]
EACH = pytest.mark.parametrize("file", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
STAGES = ("python AS wanted", "python AS build", "build AS own")
"""In this order, behind one with Python."""
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
    assert names == {"services/Dockerfile", "runtime/Dockerfile"}
    readme = (ROOT / "images" / "README.md").read_text(encoding="utf-8")
    assert all(name in readme for name in names)


@EACH
def test_the_last_stage_runs_as_a_numbered_user_who_is_not_root(file: Path) -> None:
    names = [name for name, _ in instructions(file)]
    last = instructions(file)[len(names) - 1 - names[::-1].index("FROM") :]
    users = [rest for name, rest in last if name == "USER"]
    assert len(users) == 1
    who = SecurityContextSpec()
    assert users == [f"{who.run_as_user}:{who.run_as_group}"], "the user that stage pods are given"
    assert [name for name, _ in last][-2:] == ["USER", "ENTRYPOINT"]


@EACH
def test_everything_is_pinned_and_comes_from_debian_and_pypi(file: Path) -> None:
    text = "\n".join(f"{name} {rest}" for name, rest in instructions(file))
    assert all(DEBIAN.fullmatch(rest.split()[0]) or rest in STAGES for rest in rests(file, "FROM"))
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
            assert words[0] in ("--from=wanted", "--from=build", "--from=own")
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
    (extras,) = re.findall(
        r"images/dependencies.py \"?(\S+?)\"? >", file.read_text(encoding="utf-8").replace("?operator or gateway", "")
    )
    if "PART" not in extras:
        return set(extras.split(","))
    assert set(rests(file, "ARG")) >= {"PART"}
    parts = set(re.findall(r"--build-arg PART=(\w+) -t stageline-\1:", file.read_text(encoding="utf-8")))
    assert parts == {"operator", "gateway"}
    return parts | set(extras.split(",")[1:])


@pytest.mark.parametrize("extras", ["runtime,prepare,coverage,tracing", "operator,tracing", "gateway,tracing", "dev"])
def test_what_is_installed_first_is_what_the_package_asks_for(extras: str) -> None:
    """An extra of Stageline's own is followed, and Stageline itself is not among them."""
    command = [sys.executable, "images/dependencies.py", extras]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    with (ROOT / "pyproject.toml").open("rb") as opened:
        project = tomllib.load(opened)["project"]
    assert set(project["dependencies"]) <= set(listed)
    assert len(listed) == len(set(listed))
    assert not any(line.startswith("stageline") for line in listed)
    for extra in extras.split(","):
        wanted = project["optional-dependencies"][extra]
        assert {line for line in wanted if not line.startswith("stageline[")} <= set(listed)


@EACH
def test_a_build_argument_of_one_image_stands_behind_what_all_share(file: Path) -> None:
    names = [name if name != "ARG" else f"ARG {rest}" for name, rest in instructions(file)]
    if "ARG PART" in names:
        assert names.index("RUN") < names.index("ARG PART"), "the packages of Debian are installed once for both"


@EACH
def test_labels_name_version_revision_and_licence(file: Path) -> None:
    (labels,) = rests(file, "LABEL")
    for name in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{name}=" in labels
    with (ROOT / "pyproject.toml").open("rb") as opened:
        assert f"VERSION={tomllib.load(opened)['project']['version']}" in rests(file, "ARG")


def fake_builders(folder: Path, *names: str) -> dict[str, str]:
    """An environment whose PATH holds these, which note what they are asked, and the few programs of the script."""
    folder.mkdir()
    for name in names:
        program = folder / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/asked\n')
        program.chmod(0o755)
    for name in ("sed", "git", "dirname", "sh"):
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return {"PATH": str(folder)}


def make_images(environment: dict[str, str], *parts: str) -> "subprocess.CompletedProcess[str]":
    command = ["/bin/sh", str(ROOT / "scripts" / "images"), *parts]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_make_images_takes_the_builder_that_works_and_says_what_it_calls_the_images(tmp_path: Path) -> None:
    environment = fake_builders(tmp_path / "bin", "docker", "buildah")
    (tmp_path / "bin" / "docker").write_text("#!/bin/sh\nexit 1\n")  # a client without a daemon
    built = make_images(environment | {"PIP_INDEX_URL": "https://name:word@index.example"}, "gateway", "runtime")
    assert built.returncode == 0, built.stderr
    asked = (tmp_path / "bin" / "asked").read_text()
    assert asked.startswith("buildah build --layers"), asked
    assert "PART=gateway -t stageline-gateway:" in asked
    assert "-f images/runtime/Dockerfile" in asked
    assert "--build-arg PIP_INDEX_URL -" in asked, "the name alone: its value may hold a password"
    assert "--set images.registry=localhost" in built.stdout


def test_make_images_pushes_to_the_registry_it_is_given(tmp_path: Path) -> None:
    environment = fake_builders(tmp_path / "bin", "docker") | {"REGISTRY": "r.example/team", "PUSH": "1", "TAG": "t"}
    built = make_images(environment, "operator")
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "bin" / "asked").read_text().splitlines()[
        -1
    ] == "docker push r.example/team/stageline-operator:t"


@pytest.mark.parametrize(
    ("given", "parts", "words"),
    [
        ({}, (), "nothing here builds images"),
        ({"IMAGE_BUILDER": "kaniko"}, (), "IMAGE_BUILDER=kaniko is none of"),
        ({"IMAGE_BUILDER": "podman"}, (), "is not here"),
    ],
)
def test_make_images_says_in_a_sentence_what_it_lacks(
    tmp_path: Path, given: dict[str, str], parts: tuple[str, ...], words: str
) -> None:
    refused = make_images(fake_builders(tmp_path / "bin") | given, *parts)
    assert refused.returncode == 1
    assert words in refused.stderr


@EACH
def test_the_entry_point_is_a_command_that_exists(file: Path) -> None:
    (text,) = rests(file, "ENTRYPOINT")
    program, *command = json.loads(text)
    with (ROOT / "pyproject.toml").open("rb") as opened:
        assert program in tomllib.load(opened)["project"]["scripts"]
    assert set(command) <= set(cli.list_commands(cli.make_context("stageline", ["--help"], resilient_parsing=True)))
