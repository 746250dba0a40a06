"""The layers: who may import whom, how much rooms need of each other, and what starts without torch."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes.repository_files import ROOT

# Packages whose processes never load torch. It costs seconds and hundreds of MB each, and the engine restarts often.
TORCH_FREE = (
    "stageline_api",
    "stageline_cli",
    "stageline_gateway",
    "stageline_kubernetes",
    "stageline_local",
    "stageline_operator",
    "stageline_runtime.engine",
    "stageline_runtime.speculation",
    "stageline_runtime.stage.ranks.supervisor",
    "stageline_runtime.trace",
    "stageline_vllm.engine",
    "stageline_vllm.supervisor",
)
IMPORT_ALL = """
import importlib, pkgutil, sys
for package in sys.argv[1:]:
    paths = getattr(importlib.import_module(package), "__path__", ())
    for name in [package, *(module.name for module in pkgutil.walk_packages(paths, package + "."))]:
        if not name.endswith("__main__"):
            importlib.import_module(name)
        if heavy := sorted({"torch", "transformers", "safetensors"} & sys.modules.keys()):
            sys.exit(f"{name} loads {heavy}")
"""
Crossing = tuple[str, str, str]
"""The room of a file, the room it imports from, and which file imports which module."""


def test_packages_load_without_torch() -> None:
    """Every module is really imported in a fresh process: import-linter can't see an import made by a dependency."""
    command = [sys.executable, "-c", IMPORT_ALL, *TORCH_FREE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("package", "most"),
    [("runtime/stageline_gateway", 62), ("runtime/stageline_runtime/engine", 13)],
)
def test_rooms_need_no_more_of_each_other(package: str, most: int) -> None:
    """A limit on imports between rooms, counted as pairs of a file and a module, also in a direction that is allowed.

    The gateway had 58 when its rooms were made; `/v1/responses` and `/v1/messages` are two more, the short
    way of plain requests is one, and so is that what a run tells stands apart from who asks for it.
    """
    crossings = crossings_of(ROOT / package)
    assert crossings, f"{package} has no rooms, or its imports are not understood"
    assert len(crossings) <= most, (
        f"{len(crossings)} imports of {package} cross rooms, {most} at most:\n{listed_by_pair(crossings)}"
    )


def test_a_crossing_is_a_file_and_a_module_of_another_room(tmp_path: Path) -> None:
    for file, text in {
        "house/__init__.py": "",
        "house/settings.py": "",
        "house/app.py": "from house.attic.box import Box",
        "house/attic/__init__.py": "",
        "house/attic/box.py": "from house.cellar import wine\nfrom house.cellar.wine import Wine",
        "house/attic/chest.py": "import house.cellar.coal\nfrom house import settings\nfrom house.attic.box import Box",
        "house/cellar/__init__.py": "",
        "house/cellar/coal.py": "",
        "house/cellar/wine.py": "def pour():\n    from house.attic.box import Box",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert sorted(crossings_of(tmp_path / "house", under=tmp_path)) == [
        ("attic", "cellar", "attic/box.py: house.cellar.wine"),
        ("attic", "cellar", "attic/chest.py: house.cellar.coal"),
        ("cellar", "attic", "cellar/wine.py: house.attic.box"),
    ]


def listed_by_pair(crossings: set[Crossing]) -> str:
    """Each pair of rooms with its crossings, those with most first."""
    lines = []
    for (room, other), count in Counter(crossing[:2] for crossing in crossings).most_common():
        lines.append(f"{count:4}  {room} -> {other}")
        lines += sorted(f"      {what}" for *pair, what in crossings if pair == [room, other])
    return "\n".join(lines)


def crossings_of(package: Path, under: Path = ROOT / "runtime") -> set[Crossing]:
    """Imports between the rooms of `package`. Files at its root (`app`; `errors`, `settings`) don't count."""
    dotted = ".".join(package.relative_to(under).parts)
    rooms = {init.parent.name for init in package.glob("*/__init__.py")}
    room_of = {
        f"{dotted}.{'.'.join(file.relative_to(package).with_suffix('').parts)}": room
        for room in rooms
        for file in (package / room).rglob("*.py")
    }
    return {
        (room, room_of[name], f"{file.relative_to(package)}: {name}")
        for room in rooms
        for file in (package / room).rglob("*.py")
        for name in imported_names(file)
        if room_of.get(name, room) != room
    }


def imported_names(file: Path) -> Iterator[str]:
    """Dotted names of what a file imports, anywhere in it: modules, and what is taken from them."""
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports by a relative name"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
