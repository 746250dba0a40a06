"""What a Grafana is given: boards that its own schema knows whole, provisioning files, and the container's arguments.

No Grafana runs here; that one draws the boards is what only `make grafana` shows.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from board_builder.schema import through_the_schema
from processes.repository_files import ROOT
from stageline_dashboards.shipped import board_paths

BOARDS = tuple(board_paths())
PROVISIONING = ROOT / "dashboards" / "provisioning"
SCRIPT = ROOT / "scripts" / "grafana"


@pytest.mark.parametrize("file", BOARDS, ids=[file.stem for file in BOARDS])
def test_a_board_has_nothing_that_grafanas_schema_does_not_know(file: Path) -> None:
    board = json.loads(file.read_text(encoding="utf-8"))
    assert through_the_schema(board) == board
    board["panels"][0]["fieldConfig"] = {"defaults": {"unitt": "s"}, "overrides": []}
    assert through_the_schema(board) != board, "a misspelt field would be found"


def test_the_boards_find_the_data_source_that_is_provisioned() -> None:
    [source] = yaml.safe_load((PROVISIONING / "datasources.yaml").read_text())["datasources"]
    assert source["isDefault"], "the variable of a board begins with the default one"
    for file in BOARDS:
        variables = json.loads(file.read_text(encoding="utf-8"))["templating"]["list"]
        kinds = [each["query"] for each in variables if each["type"] == "datasource"]
        assert kinds == [source["type"]], file


def run_script(folder: Path, *engines: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script on a PATH with `engines`, which print their arguments; docker's daemon answers."""
    folder.mkdir()
    for name in ("sh", "dirname"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    for name in engines:
        program = folder / name
        program.write_text('#!/bin/sh\n[ "$1" = info ] || for each; do echo "$each"; done\n')
        program.chmod(0o755)
    known = {"PATH": str(folder), "HOME": str(folder)} | environment
    return subprocess.run(["sh", str(SCRIPT)], env=known, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_the_container_sees_every_file_and_listens_on_loopback(tmp_path: Path, engine: str) -> None:
    done = run_script(tmp_path / "bin", engine, PROMETHEUS="http://127.0.0.1:9191", GRAFANA_PORT="3100")
    assert done.returncode == 0, done
    said = done.stdout.splitlines()
    assert said[0].startswith("Grafana: http://127.0.0.1:3100/dashboards, for http://127.0.0.1:9191")
    assert {"GF_SERVER_HTTP_ADDR=127.0.0.1", "GF_SERVER_HTTP_PORT=3100"} < set(said)
    assert "STAGELINE_PROMETHEUS=http://127.0.0.1:9191" in said
    mounts = {target: source for source, target in (each.split(":")[:2] for each in said if each.endswith(":ro"))}
    provided = yaml.safe_load((PROVISIONING / "dashboards.yaml").read_text())["providers"][0]["options"]["path"]
    assert Path(mounts[provided]) == BOARDS[0].parent
    assert all(Path(source).exists() for source in mounts.values()), mounts
    assert {target for target in mounts if target != provided} == {
        "/etc/grafana/provisioning/datasources/stageline.yaml",
        "/etc/grafana/provisioning/dashboards/stageline.yaml",
    }


def test_without_a_container_engine_it_says_what_draws_the_boards_here(tmp_path: Path) -> None:
    done = run_script(tmp_path / "bin")
    assert done.returncode == 1
    assert done.stderr.startswith("make grafana: nothing here runs containers. Install docker")
    assert "--monitor" in done.stderr
