"""kubectl's commands in the runbooks name what the chart renders and what the operator makes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boards.runbook_commands import (
    FORWARDED,
    GOES_ON,
    NOT_RUN,
    PRINTS_NOTHING,
    PROGRAMS,
    VARIABLES,
    WORDS,
    Shape,
    changes,
    commands_of,
    documented_commands,
    filled_in,
    only_looks,
    run_in_tests,
    to_fill_in,
)
from boards.runbook_pages import FOLDER, runbooks
from cluster.rendered_chart import NAMESPACE, found, of_kind, rendered_objects
from processes.repository_files import ROOT
from stageline_api import labels
from stageline_operator.planner.objects.stage_pod import ENGINE_CONTAINER, PREPARE_CONTAINER, STAGE_CONTAINER

TEXT = "\n".join(path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md")))
COMMANDS = re.findall(r"kubectl [^`\n|;>]+", TEXT)
VALUES = {"gateway": {"tls": {"secretName": "gateway-tls"}, "keys": {"secretName": "gateway-keys"}}}


@pytest.fixture(scope="module")
def chart() -> list[dict[str, Any]]:
    """Objects of `helm install stageline` with what docs/install.md adds: keys and a certificate."""
    return rendered_objects(VALUES)


def named(pattern: str) -> set[str]:
    """What the first group of `pattern` finds in any command; nothing found is a mistake in the pattern."""
    names = {name for command in COMMANDS for name in re.findall(pattern, command)}
    assert names, pattern
    return names


def selectors() -> Iterator[tuple[str, str]]:
    """(key, value) of every label selector."""
    for selector in named(r" -l (\S+)"):
        for pair in selector.split(","):
            key, _, value = pair.partition("=")
            yield key, value


def test_deployments_and_their_namespace_are_the_charts(chart: list[dict[str, Any]]) -> None:
    deployments = {each["metadata"]["name"] for each in of_kind(chart, "Deployment")}
    assert named(r"deploy[ /](\S+)") <= deployments
    assert named(r"-n (\S+)") == {"$NAMESPACE", NAMESPACE}


def test_lease_secret_account_and_port_are_the_charts(chart: list[dict[str, Any]]) -> None:
    operator = found(chart, "Deployment", "stageline-operator")["spec"]["template"]["spec"]
    assert {f"--lease-name={name}" for name in named(r"get lease (\S+)")} <= set(operator["containers"][0]["args"])
    assert named(r"system:serviceaccount:(\S+)") == {f"{NAMESPACE}:{operator['serviceAccountName']}"}
    gateway = found(chart, "Deployment", "stageline-gateway")["spec"]["template"]["spec"]
    assert named(r"get secret (\w\S+)") == {"gateway-tls"}
    assert "create secret tls gateway-tls" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    ports = {str(port["containerPort"]) for port in gateway["containers"][0]["ports"]}
    assert named(r"port-forward deploy/stageline-gateway (\d+)") <= ports


def test_labels_are_those_of_the_pods(chart: list[dict[str, Any]]) -> None:
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in of_kind(chart, "Deployment")]
    for key, value in selectors():
        if key == "app.kubernetes.io/component":
            assert value in {pod[key] for pod in pods}
        else:
            assert key in {labels.MODEL, labels.GROUP, labels.STAGE}


def test_containers_are_those_of_a_stages_pod() -> None:
    assert named(r" -c (\S+)") <= {STAGE_CONTAINER, ENGINE_CONTAINER, PREPARE_CONTAINER}


def test_logs_of_pods_by_label_are_whole() -> None:
    """Unless told, kubectl gives ten lines of each pod that a selector finds."""
    by_label = [command for command in COMMANDS if " logs -l " in command]
    assert len(by_label) > 5
    assert [command for command in by_label if "--tail=" not in command] == []


def test_commands_are_lines_of_shell_and_spans_that_begin_with_a_program(tmp_path: Path) -> None:
    page = tmp_path / "StagelineX.md"
    page.write_text(
        "Look at `stageline_up` and `kubectl\nget plm`, of `-c stage` and `helm`.\n"
        "```sh\nA=b  # said\ncurl x | wc\n```\n```promql\nup\n```\n"
    )
    assert list(commands_of(page)) == ["curl x | wc", "kubectl get plm"]
    assert filled_in("a $N N FILE PROFILE N-N '{N}'", {"N": "2", "FILE": "f"}) == "a $N 2 f PROFILE N-N '{2}'"


def test_every_page_has_commands_and_each_begins_with_a_known_program() -> None:
    documented = documented_commands()
    assert {page for pages in documented.values() for page in pages} == {*runbooks(), "README"}
    assert [command for command in documented if command.split()[0] not in PROGRAMS] == []
    assert set(re.findall(r"^```(\w+)$", TEXT, re.MULTILINE)) == {"sh", "promql", "yaml"}


def test_what_a_reader_fills_in_is_what_the_first_page_speaks_of() -> None:
    known = {*WORDS, *(f"${name}" for name in VARIABLES)}
    filled = {word for command in documented_commands() for word in to_fill_in(command)}
    assert filled == known
    first_page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in VARIABLES if f"\n{name}=" not in first_page] == []
    words = {word: word.lower() for word in (*WORDS, *FORWARDED)}
    left = {word for command in documented_commands() for word in to_fill_in(filled_in(command, words))}
    assert left == {f"${name}" for name in VARIABLES}


def test_a_forwarded_port_is_asked_where_it_was_forwarded_to() -> None:
    forwarded = named(r"port-forward \S+ (\d+)")
    asked = {port for command in documented_commands() for port in re.findall(r"127\.0\.0\.1:(\d+)", command)}
    assert forwarded == asked == {address.rpartition(":")[2] for address in FORWARDED}


def test_every_command_that_is_run_is_known_to_change_something_or_nothing() -> None:
    """tests/cluster/test_runbook_commands_run.py types them on a control plane; those that change something, last."""
    run = run_in_tests()
    assert len(run) > 50
    assert [command for command in run if changes(command) == only_looks(command)] == []


@pytest.mark.parametrize("shape", [*NOT_RUN, *GOES_ON, *PRINTS_NOTHING], ids=lambda shape: shape.pattern)
def test_an_exception_is_one_that_some_page_needs(shape: Shape) -> None:
    assert any(shape.fits(command) for command in documented_commands())
