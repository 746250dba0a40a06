"""What the documents say about the repository, held against the repository."""

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from processes.repository_files import ROOT, repository_files

LINK = re.compile(r"\]\(([^)\s]+)\)")
PLACEHOLDER = re.compile(r"\b[A-Z0-9_]+_PLACEHOLDER\b")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
DOCUMENTS = [path for path in repository_files() if path.suffix == ".md"]


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["project"]
    return table


def broken_links(document: Path) -> list[str]:
    """Relative links of a document that lead nowhere, and in-page links without a heading."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    anchors = {
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    broken = []
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        if path and not (document.parent / path).exists():
            broken.append(target)
        if not path and anchor not in anchors:
            broken.append(target)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    assert broken_links(document) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n[x](nowhere.md) [y](#a-page) [z](#gone) [w](https://example.org/)\n", encoding="utf-8")
    assert broken_links(page) == ["nowhere.md", "#gone"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_nothing_is_left_to_be_filled_in(document: Path) -> None:
    assert PLACEHOLDER.findall(document.read_text(encoding="utf-8")) == []


def test_a_placeholder_is_seen() -> None:
    assert PLACEHOLDER.findall("It takes STEP_TIME_PLACEHOLDER ms; a placeholder") == ["STEP_TIME_PLACEHOLDER"]


def test_architecture_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = [path for folder in ("operator", "runtime") for path in (ROOT / folder).glob("stageline_*")]
    parts = [path for path in (ROOT / "runtime" / "stageline_runtime").iterdir() if (path / "__init__.py").exists()]
    missing = [path.name for path in packages + parts if f"- [`{path.name}`](../{path.relative_to(ROOT)}/)" not in text]
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
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
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


def test_the_log_is_dated_newest_first() -> None:
    text = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    dates = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert dates
    assert all(re.fullmatch(r"\d{4}-\d{2}-\d{2}", date) for date in dates)
    assert dates == sorted(dates, reverse=True)
