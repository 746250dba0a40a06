"""Every alert leads to a page that somebody woken at night can follow: complete, and naming only what exists."""

import re
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
import yaml

from boards.alert_scenarios import alert_names, alerting_rules
from boards.board_queries import BOARDS, board_named, panels_of
from boards.exported_names import missing_names
from boards.promtool import needs_promtool, promtool
from boards.rule_names import exported_in, recorded_in, recorded_names
from boards.runbook_pages import FOLDER, SECTIONS, Runbook, runbooks
from cluster.chart_values_table import described_values
from processes.repository_files import ROOT
from stageline_cli.main import cli

PAGES = runbooks()
EACH = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
FIELDS = ("engine", "model", "parallelism", "placement", "restart", "rollout", "template", "timeouts")
VALUES = ("monitoring", "gateway", "operator", "networkPolicy")


def panel_titles(board: str) -> set[str]:
    """Of a shipped board."""
    return {panel["title"] for panel in panels_of(board_named(board)) if panel["type"] != "row"}


def options_of(*commands: str) -> set[str]:
    """Every option of some of Stageline's commands. Fails for a command that there isn't."""
    found: set[str] = set()
    for name in commands:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, f"stageline {name} does not exist"
        found |= {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    return found


def test_there_is_one_page_for_each_alert_and_none_besides() -> None:
    assert sorted(PAGES) == sorted(alert_names())


@pytest.mark.parametrize("rule", alerting_rules(), ids=lambda rule: rule["alert"])
def test_a_runbook_url_leads_to_the_heading_of_its_alert(rule: Mapping[str, Mapping[str, str]]) -> None:
    path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert (ROOT / path) == FOLDER / f"{rule['alert']}.md"
    assert anchor == str(rule["alert"]).lower()
    assert anchor in Runbook(ROOT / path).anchors


@EACH
def test_a_page_says_all_that_is_needed_in_order(page: Runbook) -> None:
    assert page.text.startswith(f"# {page.path.stem}\n")
    assert tuple(page.sections) == SECTIONS
    assert all(len(text) > 30 for text in page.sections.values()), page.sections
    diagnosis = page.sections["Diagnosis"]
    assert "```sh" in diagnosis
    assert "```promql" in diagnosis
    assert re.search(r"Board \*\*\w+\*\*", diagnosis), "no board"
    assert "```sh" in page.sections["Capture"]


@EACH
def test_the_commands_of_a_page_exist(page: Runbook) -> None:
    for name, *words in page.stageline_commands:
        unknown = {word for word in words if word.startswith("-")} - options_of(name)
        assert not unknown, f"stageline {name} knows no {unknown}"
    flags = set(re.findall(r"`(--[a-z-]+)`", page.text))
    assert flags <= options_of("gateway", "operator"), flags


@EACH
def test_the_panels_that_a_page_points_at_exist(page: Runbook) -> None:
    boards = {name.lower() for name in re.findall(r"[Bb]oard\s+\*\*(\w+)\*\*", page.text)}
    assert boards
    assert boards <= set(BOARDS)
    assert all(title in panel_titles(board) for board, title in page.panels), page.panels
    everywhere = {title for board in BOARDS for title in panel_titles(board)} | {"Status > Targets"}
    prose = " ".join(re.sub(r"^```.*?^```", "", page.text, flags=re.DOTALL | re.MULTILINE).split())
    assert set(re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", prose)) <= everywhere


@EACH
def test_the_fields_and_values_that_a_page_speaks_of_exist(page: Runbook) -> None:
    reference = (ROOT / "docs" / "pipelinemodel.md").read_text(encoding="utf-8")
    assert [name for name in page.spoken_of(*FIELDS) if f"`spec.{name}`" not in reference] == []
    values = {path for path, _ in described_values()}
    assert [name for name in page.spoken_of(*VALUES) if name not in values] == []


def test_metrics_of_the_pages_are_exported_or_recorded(exported_pages: Mapping[str, str]) -> None:
    text = "\n".join(page.text for page in PAGES.values())
    missing = missing_names(exported_in(text), exported_pages)
    assert len(exported_in(text)) > 10
    assert missing_names([f"{name}_count" for name in missing], exported_pages) == [], "not even a histogram"
    assert recorded_in(text) <= recorded_names()


@needs_promtool
def test_the_queries_of_the_pages_are_promql(tmp_path: Path) -> None:
    queries = [query for page in PAGES.values() for query in page.code("promql")]
    rules = [{"record": f"query:number_{number}:any", "expr": query} for number, query in enumerate(queries)]
    assert len(rules) >= len(PAGES)
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}), encoding="utf-8")
    promtool("check", "rules", file)


def test_the_index_lists_each_alert_as_its_rule_says_it() -> None:
    rows = re.findall(
        r"^\| \[(\w+)\]\((\w+)\.md\) \| ([a-z ]+) \| (.+) \|$", (FOLDER / "README.md").read_text("utf-8"), re.M
    )
    assert [name for name, *_ in rows] == [target for _, target, *_ in rows]
    rules = alerting_rules()
    expected = {
        (rule["alert"], " or ".join(dict.fromkeys(severities(rule["alert"]))), rule["annotations"]["summary"])
        for rule in rules
    }
    assert {(name, severity, summary) for name, _, severity, summary in rows} == expected
    assert len(rows) == len(PAGES)


def severities(alert: str) -> list[str]:
    """Of an alert's rules, in order."""
    return [rule["labels"]["severity"] for rule in alerting_rules() if rule["alert"] == alert]


@pytest.mark.parametrize("rule", alerting_rules(), ids=lambda rule: f"{rule['alert']} {rule.get('for', '')}")
def test_an_alert_keeps_the_house_rules(rule: Mapping[str, str | Mapping[str, str]]) -> None:
    labels, annotations = rule["labels"], rule["annotations"]
    assert isinstance(labels, Mapping)
    assert isinstance(annotations, Mapping)
    assert re.fullmatch(r"Stageline([A-Z]\w+)+", str(rule["alert"]))
    assert labels["severity"] in {"critical", "warning", "info"}
    assert annotations.keys() == {"summary", "description", "runbook_url"}
    assert "{{" not in annotations["summary"]
    assert annotations["summary"].endswith(".")
    assert annotations["description"].endswith(".")
