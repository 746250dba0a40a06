"""What the documents say about the repository, held against the repository."""

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from boards.game_day_page import page
from processes.repository_files import ROOT, repository_files

LINK = re.compile(r"\]\(([^)\s]+)\)")
PLACEHOLDER = re.compile(r"\b[A-Z0-9_]+_PLACEHOLDER\b")
DEVELOPERS = ROOT / "docs" / "dev"
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
DOCUMENTS = [path for path in repository_files() if path.suffix == ".md"]


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["project"]
    return table


def anchors_of(document: Path) -> set[str]:
    """What a link may name behind `#` in a page: its headings, as GitHub writes them."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    return {
        re.sub(r"[^\w -]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each).lower()).replace(" ", "-")
        for each in headings
    }


def broken_links(document: Path) -> list[str]:
    """Relative links of a document that lead nowhere, and anchors without a heading, of this page or another."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    broken = []
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = document.parent / path if path else document
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors_of(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    assert broken_links(document) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    links = "[x](nowhere.md) [y](#a-page) [z](#gone) [w](https://example.org/) [u](page.md#a-page) [v](page.md#gone)"
    file.write_text(f"# A page\n{links}\n", encoding="utf-8")
    assert broken_links(file) == ["nowhere.md", "#gone", "page.md#gone"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_nothing_is_left_to_be_filled_in(document: Path) -> None:
    assert PLACEHOLDER.findall(document.read_text(encoding="utf-8")) == []


def test_a_placeholder_is_seen() -> None:
    assert PLACEHOLDER.findall("It takes STEP_TIME_PLACEHOLDER ms; a placeholder") == ["STEP_TIME_PLACEHOLDER"]


def test_architecture_names_every_package() -> None:
    text = (DEVELOPERS / "architecture.md").read_text(encoding="utf-8")
    packages = [path for folder in ("operator", "runtime") for path in (ROOT / folder).glob("stageline_*")]
    parts = [path for path in (ROOT / "runtime" / "stageline_runtime").iterdir() if (path / "__init__.py").exists()]
    missing = [
        path.name for path in packages + parts if f"- [`{path.name}`](../../{path.relative_to(ROOT)}/)" not in text
    ]
    assert missing == []


def direct_dependencies() -> set[str]:
    """Names as pyproject spells them, without the distribution's own extras."""
    requirements = [*project()["dependencies"]]
    for extra in project()["optional-dependencies"].values():
        requirements += extra
    names = {match[0] for text in requirements if (match := re.match(r"[A-Za-z0-9._-]+", text))}
    return names - {project()["name"]}


def dependency_rows() -> dict[str, list[str]]:
    """Cells of each row of the dependency table, by package name."""
    text = (DEVELOPERS / "dependencies.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    return {row[0].strip("`"): row for row in rows}


def test_the_dependency_page_lists_exactly_the_direct_dependencies() -> None:
    assert set(dependency_rows()) == direct_dependencies()


@pytest.mark.parametrize("name", sorted(direct_dependencies()))
def test_the_dependency_page_says_truly_whether_a_package_has_types(name: str) -> None:
    files = metadata.distribution(name).files or []
    shipped = any(file.name == "py.typed" for file in files)
    stubs = f"types-{name.lower()}" in {other.lower() for other in direct_dependencies()} or name.startswith("types-")
    assert dependency_rows()[name][5] == ("stubs" if stubs else "yes" if shipped else "no")


def test_every_extra_says_who_needs_a_package() -> None:
    for name, row in dependency_rows().items():
        users = {
            extra
            for extra, texts in project()["optional-dependencies"].items()
            for text in texts
            if re.match(rf"{re.escape(name)}\W", text)
        }
        if any(re.match(rf"{re.escape(name)}\W", text) for text in project()["dependencies"]):
            users = {"everything"}
        assert set(row[1].split(", ")) == users, name


def test_every_direct_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in pins), pins
    assert pins == sorted(pins, key=str.lower)

    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    assert {normal(name) for name in direct_dependencies()} <= {normal(line.split("==")[0]) for line in pins}


def test_the_game_day_begins_as_its_program_writes_it() -> None:
    assert (DEVELOPERS / "game-day.md").read_text(encoding="utf-8").startswith(page([]).rstrip())


MAX_LOG_ENTRY_WORDS = 120
MAX_CHANGELOG_LINES = 40
LOG_MONTHS = sorted((DEVELOPERS / "log").glob("*.md"))


def log_entries(text: str) -> list[str]:
    """Each begins with its title in bold, at the start of a line, and ends before the next title or date."""
    return re.findall(r"^\*\*.*?(?=^\*\*|^## |\Z)", text, re.MULTILINE | re.DOTALL)


def faults_of_entry(entry: str) -> list[str]:
    words = len(entry.split())
    faults = [f"{words} words"] if words > MAX_LOG_ENTRY_WORDS else []
    return faults if re.search(r"\b(Kept|Dropped|[Oo]pen)\b", entry) else [*faults, "neither Kept, Dropped nor Open"]


@pytest.mark.parametrize("month", LOG_MONTHS, ids=lambda path: path.name)
def test_log_entries_are_short_and_have_an_outcome(month: Path) -> None:
    entries = log_entries(month.read_text(encoding="utf-8"))
    assert entries
    assert {entry.splitlines()[0]: faults for entry in entries if (faults := faults_of_entry(entry))} == {}


def test_a_long_log_entry_without_an_outcome_is_seen() -> None:
    text = "# Log\n\n## 2026-11-28\n\n**Short.** Measured: 1 ms. Kept.\n\n**Long.** " + "word " * 120 + "\n"
    assert [faults_of_entry(entry) for entry in log_entries(text)] == [
        [],
        ["121 words", "neither Kept, Dropped nor Open"],
    ]


def test_each_version_of_the_changelog_is_short() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    lines = {section.splitlines()[0]: len(section.strip().splitlines()) for section in sections}
    assert lines
    assert {version: count for version, count in lines.items() if count > MAX_CHANGELOG_LINES} == {}


def test_the_newest_changelog_entry_is_the_packages_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[([^\]]+)\]", text, re.MULTILINE)
    assert newest is not None
    assert newest[1] == project()["version"] == metadata.version("stageline")


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.lstrip().startswith("Apache License")
    assert "END OF TERMS AND CONDITIONS" in text
    assert project()["license"] == "Apache-2.0"


@pytest.mark.parametrize("month", LOG_MONTHS, ids=lambda path: path.name)
def test_a_month_of_the_log_is_dated_newest_first(month: Path) -> None:
    dates = re.findall(r"^## (.*)$", month.read_text(encoding="utf-8"), re.MULTILINE)
    assert dates
    assert [date for date in dates if not re.fullmatch(rf"{month.stem}-\d{{2}}", date)] == []
    assert dates == sorted(dates, reverse=True)
