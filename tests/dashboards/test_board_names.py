"""Boards ask only for what the real endpoints export and what the shipped rules record, by labels that are there."""

import re
from collections.abc import Iterator, Mapping

import pytest

from boards.board_queries import BOARDS, every_expression, queries_of
from boards.exported_names import missing_names
from boards.promql_labels import EXPORTED, read
from boards.recorded_history import recorded, recorded_names

MADE_BY_PROMETHEUS = {"ALERTS"}
JOINED = {f"model:stageline_{kind}_request_ratio:objective" for kind in ("slow", "failed")}
_NAME = re.compile(r"(?<![\w:$])(ALERTS|stageline_\w+)(?![\w:])")
_SELECTOR = re.compile(r"(?<![\w:])(stageline_\w+)\{([^}]*)\}")
EACH = pytest.mark.parametrize("name", sorted(BOARDS))


def metric_names(name: str) -> set[str]:
    """Names of exported series in a board's expressions, strings and recorded names left out."""
    exprs = (re.sub(r'"[^"]*"', '""', expr) for expr in every_expression(BOARDS[name]))
    return {found for expr in exprs for found in _NAME.findall(expr)}


def selectors(name: str) -> Iterator[tuple[str, set[str]]]:
    """(metric, labels that it is selected by)."""
    for expr in every_expression(BOARDS[name]):
        for metric, matchers in _SELECTOR.findall(expr):
            yield metric, set(re.findall(r"(\w+)=?[=!]~?", matchers))


@EACH
def test_what_a_board_asks_for_is_exported(name: str, exported_pages: Mapping[str, str]) -> None:
    used = metric_names(name)
    assert len(used) > 10, used
    assert missing_names(used, exported_pages) == []
    assert {each for each in used if not each.startswith("stageline_")} <= MADE_BY_PROMETHEUS


@EACH
def test_what_a_board_asks_of_the_rules_is_recorded(name: str) -> None:
    asked = recorded_names(every_expression(BOARDS[name]))
    assert asked <= recorded().keys()
    assert bool(asked) == (name in {"fleet", "gateway", "pipeline"})


@EACH
def test_boards_group_and_join_by_labels_that_are_there(name: str) -> None:
    assert [wrong for expr in every_expression(BOARDS[name]) for wrong in read(expr).wrong] == []


@EACH
def test_series_are_selected_by_labels_that_they_have(name: str) -> None:
    """The lists' labels are those of the real endpoints: tests/observability/test_exported_metrics.py."""
    for metric, labels in selectors(name):
        assert labels <= EXPORTED[metric], f"{metric} has {sorted(EXPORTED[metric])}"


@EACH
def test_every_query_keeps_to_the_chosen_clusters(name: str) -> None:
    """What is recorded without being selected is joined to what is, by all labels, the cluster among them."""
    asked = re.compile(r"(?<![\w:$])(ALERTS|[a-z_]+:stageline_\w+(?::\w+)?|stageline_\w+)(\{[^}]*\})?")
    free = {
        (query.title, found[0])
        for query in queries_of(name)
        for found in asked.finditer(query.expr)
        if 'cluster=~"$cluster"' not in (found[2] or "") and found[1] not in JOINED
    }
    assert free == set()
