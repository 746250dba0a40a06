"""The shipped boards are what their sources make, and keep the rules that make a board readable and portable.

The rules are those of Grafana's dashboard linter, which can't be had here, and a few of the house.
"""

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from board_builder import __main__ as builder
from board_builder import links
from board_builder.layout import COLUMNS, Line
from board_builder.panels import Text, number
from boards.board_queries import BOARDS, board_named, every_expression, panel_titled, panels_of

EACH = pytest.mark.parametrize("name", sorted(BOARDS))
FOREIGN_WINDOWS = {"[1h]": "how far back the last life of a group, or a series that is scraped again, may lie"}
"""Windows that are meant to be of one length whatever the scrape interval is, and why."""

OPEN_ROWS = {
    "fleet": ["Overview", "Stages and bubble", "Latency", "SLOs and error budgets", "Models and groups"],
    "pipeline": ["Overview", "Stages and bubble", "Steps and transfers", "Incarnations and failures"],
    "gateway": ["Overview", "Groups and engines"],
    "operator": ["Overview", "Groups"],
}
"""What a reader sees without a click: first whether something is wrong, then the parts that it is traced to."""


def drawn(name: str) -> list[dict[str, Any]]:
    """The panels that aren't headings."""
    return [panel for panel in panels_of(board_named(name)) if panel["type"] != "row"]


def test_the_files_are_what_the_sources_make() -> None:
    assert builder.stale_files() == [], "run make generate"


def test_a_changed_a_missing_and_a_strange_file_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = builder.made_boards()
    for file, text in made.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    (tmp_path / "fleet.json").write_text(made["fleet.json"].replace("Request rate", "Asks"), encoding="utf-8")
    (tmp_path / "gateway.json").unlink()
    (tmp_path / "mine.json").write_text("{}", encoding="utf-8")
    assert builder.stale_files(tmp_path) == ["fleet.json", "gateway.json", "mine.json"]
    assert builder.main(["--nonsense"]) == 2
    assert "usage" in capsys.readouterr().err


def test_there_is_a_board_for_each_question() -> None:
    assert sorted(BOARDS) == ["fleet", "gateway", "operator", "pipeline"]
    boards = [board_named(name) for name in BOARDS]
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == len(boards)
    assert all(8 <= len(board["uid"]) <= 40 and board["description"] and board["tags"] for board in boards)


def test_the_first_number_of_all_is_how_many_tokens_there_are() -> None:
    assert drawn("fleet")[0]["title"] == "Token throughput"


@EACH
def test_every_panel_says_what_it_shows(name: str) -> None:
    for panel in drawn(name):
        said = panel.get("title"), panel.get("description"), panel["fieldConfig"]["defaults"].get("unit")
        assert all(said), f"{panel.get('title')}: {said}"
        assert str(panel["description"]).endswith("."), panel["title"]
    titles = [panel["title"] for panel in drawn(name)]
    assert len(set(titles)) == len(titles), sorted(titles)


def columns(panel: dict[str, Any]) -> set[str]:
    """Labels and values that a table shows; none of another panel."""
    organized = (each["options"] for each in panel.get("transformations", ()) if each["id"] == "organize")
    return {field for options in organized for field in options["renameByName"]}


def test_stages_are_written_in_one_way_and_listed_in_their_order_beyond_the_tenth() -> None:
    """Legends, rows and bars are sorted as text, where 10 comes before 2 but after 02."""
    two_digits = re.compile(r'label_replace\(.*, "stage", "0\$1", "stage", "\(\[0-9\]\)"\)', re.DOTALL)
    listing = [
        (name, panel["title"], target["expr"])
        for name in BOARDS
        for panel in drawn(name)
        for target in panel["targets"]
        if "{{stage}}" in target.get("legendFormat", "") or columns(panel) & {"stage", "place"}
    ]
    assert {"Stages", "Firing alerts", "Stages not ready"} < {title for _, title, _ in listing}
    assert len(listing) > 20, listing
    assert [each[:2] for each in listing if not two_digits.search(each[2])] == []


def colors_of(panel: dict[str, Any]) -> dict[str, str]:
    """Fixed colors by what they are for: a series' name, or the letter of a query."""
    return {
        each["matcher"]["options"]: prop["value"]["fixedColor"]
        for each in panel["fieldConfig"]["overrides"]
        for prop in each["properties"]
        if prop["id"] == "color"
    }


@pytest.mark.parametrize(("title", "most"), [("Stage time: busy, wait, idle", 3), ("Stage $stage", 11)])
def test_who_works_is_warm_and_who_waits_is_cold(title: str, most: int) -> None:
    """In a pipeline that stands the stage at fault is the one that works; green would call it well."""
    colors = colors_of(panel_titled("pipeline", title))
    assert len(colors) == most, colors
    tone = {name: color.rpartition("-")[2] for name, color in colors.items()}
    assert {each for name, each in tone.items() if name.startswith("busy")} <= {"orange", "yellow", "red"}, colors
    assert {each for name, each in tone.items() if name.startswith("wait")} <= {"blue", "purple"}, colors
    assert tone["idle"] == "gray"
    assert len(set(colors.values())) == most, colors


def test_the_stage_that_the_others_wait_for_is_red_and_they_are_blue() -> None:
    shades = panel_titled("pipeline", "Imbalance by stage")["options"]["color"]
    assert (shades["scheme"], shades["reverse"]) == ("RdYlBu", True)
    assert shades["min"] < 1 < shades["max"], "an even pipeline is between them"


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("fleet", "TTFT p99"),
        ("fleet", "TPOT p99"),
        ("gateway", "TTFT p99"),
        ("pipeline", "TTFT p99"),
        ("pipeline", "TPOT p99"),
    ],
)
def test_a_latency_is_red_while_the_recorded_objective_is_missed_and_green_else(name: str, title: str) -> None:
    panel = panel_titled(name, title)
    assert colors_of(panel) == {"A": "green", "B": "red"}
    kept, missed = (target["expr"] for target in panel["targets"])
    word = "first" if title.startswith("TTFT") else "output"
    assert re.search(rf"unless on \(\) \(.*{word}_token_slow_per_request:ratio_rate5m.*:objective.* > 1\)", kept)
    assert kept.replace(" unless on () ", " and on () ") == missed


WITH_FRACTIONS = {
    "Accepted length",
    "Batch size",
    "Batch size distribution",
    "Busiest stage of each group",
    "Error budgets by model",
    "Errors: burn rate",
    "Highest burn rate",
    "Imbalance",
    "Imbalance by stage",
    "TPOT: burn rate",
    "TTFT: burn rate",
}
"""Panels without a unit that show ratios and means; all others show what can be counted."""


@EACH
def test_what_can_be_counted_is_never_shown_in_fractions(name: str) -> None:
    plain = {
        panel["title"]: panel["fieldConfig"]["defaults"]
        for panel in drawn(name)
        if panel["fieldConfig"]["defaults"]["unit"] == "none" and panel["type"] not in ("table", "state-timeline")
    }
    assert {title for title, defaults in plain.items() if defaults.get("decimals") != 0} <= WITH_FRACTIONS
    extrapolated = [
        (panel["title"], target["expr"])
        for panel in drawn(name)
        if panel["type"] != "heatmap"
        for target in panel["targets"]
        if "increase(" in target["expr"].replace("round(increase(", "")
    ]
    assert extrapolated == []


@EACH
def test_titles_are_whole_on_a_window_of_1240_pixels(name: str) -> None:
    """Letters of Grafana's title font are 7.5 pixels wide on the average; gap, padding and the hint take 40."""
    column = (1240 - 2 * 16) / COLUMNS
    cut = [
        (panel["title"], panel["gridPos"]["w"])
        for panel in drawn(name)
        if len(panel["title"]) * 7.5 > panel["gridPos"]["w"] * column - 40
    ]
    assert cut == []


@EACH
def test_every_query_goes_to_the_chosen_data_source(name: str) -> None:
    board = board_named(name)
    first, *others = board["templating"]["list"]
    assert first["type"] == "datasource"
    assert first["name"] == "datasource"
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    asking = [*drawn(name), *others, *board["annotations"]["list"]]
    assert [each.get("datasource") for each in asking] == [chosen] * len(asking)
    assert all("datasource" not in target for panel in drawn(name) for target in panel["targets"])


@EACH
def test_numbers_and_tables_are_of_this_moment(name: str) -> None:
    """Over a range the last value that there was would stand for now, however old it is."""
    of_now = [panel for panel in drawn(name) if panel["type"] in ("stat", "table", "barchart")]
    assert len(of_now) > 4
    assert all(target["instant"] and not target["range"] for panel in of_now for target in panel["targets"])


@EACH
def test_variables_narrow_each_other(name: str) -> None:
    seen: list[str] = []
    for variable in board_named(name)["templating"]["list"][1:]:
        assert variable["label"]
        assert variable["description"]
        assert variable["refresh"] == 2, "asked again when the time range changes"
        used = re.findall(r"\$(\w+)", variable["query"]["query"])
        assert used == seen[: len(used)], f"{variable['name']} uses {used}; before it: {seen}"
        assert used or not seen, f"{variable['name']} isn't narrowed by {seen}"
        if variable["name"] != "asked_for":
            seen.append(variable["name"])


def test_what_nobody_chooses_is_not_set_by_what_somebody_chose_on_another_board() -> None:
    variables = [each for name in BOARDS for each in board_named(name)["templating"]["list"]]
    hidden = [each for each in variables if each.get("hide")]
    chosen = {each["name"] for each in variables if not each.get("hide")}
    assert {each["name"] for each in hidden} == {"asked_for", "pipeline_model", "stage"}
    assert not chosen & {each["name"] for each in hidden}
    assert all(each["skipUrlSync"] and not each.get("allValue") for each in hidden)


@EACH
def test_windows_follow_the_scrape_interval(name: str) -> None:
    for expr in every_expression(BOARDS[name]):
        for window in re.findall(r"\[[^\]]*[a-z_][^\]]*\]", re.sub(r'"[^"]*"', "", expr)):
            assert window == "[$__rate_interval]" or window in FOREIGN_WINDOWS, expr


@EACH
def test_panels_fill_the_grid_without_overlap(name: str) -> None:
    panels = list(panels_of(board_named(name)))
    places = [(each["title"], each["gridPos"]) for each in panels]
    for title, at in places:
        assert 0 <= at["x"] < at["x"] + at["w"] <= COLUMNS, title
    for (one, a), (other, b) in combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart = apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart, f"{one} and {other} overlap"
    assert len({panel["id"] for panel in panels}) == len(panels)


@EACH
def test_the_open_rows_are_the_overview_and_what_it_is_traced_to(name: str) -> None:
    headings = [panel for panel in board_named(name)["panels"] if panel["type"] == "row"]
    assert not any(heading["collapsed"] for heading in headings[:2])
    assert [heading["title"] for heading in headings if not heading["collapsed"]] == OPEN_ROWS[name]


@EACH
def test_boards_lead_to_each_other_and_to_runbooks(name: str) -> None:
    board = board_named(name)
    lists, runbooks = board["links"]
    assert (lists["type"], lists["tags"], lists["includeVars"], lists["keepTime"]) == (
        "dashboards",
        board["tags"],
        True,
        True,
    )
    assert runbooks["url"].startswith(f"{links.RUNBOOKS}/")
    uids = {board_named(other)["uid"]: board_named(other) for other in BOARDS}
    for url in re.findall(r'"url": "(/d/[^"]+)"', BOARDS[name].read_text(encoding="utf-8")):
        target = uids[url.removeprefix("/d/").partition("?")[0]]
        known = {each["name"] for each in target["templating"]["list"]}
        assert set(re.findall(r"var-(\w+)=", url)) <= known, f"{url}: {target['title']} has {known}"


def test_a_line_that_does_not_fill_the_grid_is_refused() -> None:
    panel = number(Text("Title", "What it is.", "s"), "up")
    with pytest.raises(ValueError, match="don't fill 24 columns"):
        Line(4, (panel,), (12,)).columns()
