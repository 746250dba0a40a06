"""What must never appear in the repository, each because of a fault that is hard to see from its symptom."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from processes.repository_files import PACKAGE_FOLDERS, ROOT, package_sources, repository_files

MAX_FILE_BYTES = 1_000_000
PICKLING_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
# Calls of torch and pyzmq that pickle under another name.
PICKLING_CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "recv_pyobj",
    "scatter_object_list",
    "send_object_list",
    "send_pyobj",
}
# Home folders and checkouts of a particular machine, at the start of an absolute path.
MACHINE_PATH = re.compile(rb"(?<![\w.}/-])/(?:work/(?:main|shared|\.\w+)|root|home/[a-z]\w*|Users/\w+)(?:/(?=\w)|$)")


def relative(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_package_folders_and_tests_are_not_packages() -> None:
    """`operator/__init__.py` would shadow the standard library's `operator`, and pip itself would die."""
    strays = [ROOT / folder / "__init__.py" for folder in PACKAGE_FOLDERS]
    strays += (ROOT / "tests").rglob("__init__.py")
    assert relative([path for path in strays if path.exists()]) == []


def test_nothing_is_importable_straight_from_a_package_folder() -> None:
    """Both folders are on sys.path through the editable install, so a module there would be a top-level module."""
    strays = [path for folder in PACKAGE_FOLDERS for path in (ROOT / folder).glob("*.py")]
    assert relative(strays) == []


@pytest.mark.parametrize("flags", [[], ["-I"]], ids=["root-on-path", "isolated"])
def test_import_operator_is_the_standard_librarys(flags: list[str]) -> None:
    program = "import operator; print(operator.__file__); operator.itemgetter(0)"
    done = subprocess.run(
        [sys.executable, *flags, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).is_relative_to(ROOT / "operator")


def test_no_test_or_support_module_is_named_like_a_standard_module() -> None:
    """tests/support is on sys.path, so a `types.py` there would take the standard one's place."""
    importable = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    assert relative([path for path in importable if path.stem in sys.stdlib_module_names]) == []


def test_no_package_is_named_like_a_standard_module() -> None:
    tops = [ROOT / folder for folder in PACKAGE_FOLDERS]
    packages = {path.parent.name for path in package_sources() if path.parent.parent in tops}
    assert len(packages) >= len(tops), packages
    assert packages & sys.stdlib_module_names == set()
    assert all(name.startswith("stageline_") for name in packages), packages


def test_no_large_file_is_committed() -> None:
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in repository_files()}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_BYTES} == {}


def test_no_path_of_one_machine_is_committed() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.decode(errors='replace').strip()}"
        for path in repository_files()
        for number, line in enumerate(path.read_bytes().splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "matches"),
    [
        (b'path = "/ro' + b'ot/models"', True),
        (b"cd /wo" + b"rk/main/docs", True),
        (b"/ho" + b"me/anna/x", True),
        (b"https://example.org/wo" + b"rk/main", False),
        (b"./ro" + b"ot/models", False),
        (b'mountPath: "/work/here"', False),
        (b"mount at /ro" + b"ot, say", False),
    ],
)
def test_the_machine_path_pattern_tells_paths_from_words(line: bytes, matches: bool) -> None:
    assert bool(MACHINE_PATH.search(line)) is matches


def pickling_uses(source: str) -> list[str]:
    """Imports of pickling modules and calls of pickling functions in one module's source."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.split(".")[0] in PICKLING_MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLING_MODULES:
                found.append(module)
            case ast.Attribute(attr=attribute) if attribute in PICKLING_CALLS:
                found.append(attribute)
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                found.append("torch.load")
    return found


def test_nothing_in_the_packages_pickles() -> None:
    """A pickle read from a socket or from a downloaded file runs whatever its sender likes."""
    found = {str(path.relative_to(ROOT)): pickling_uses(path.read_text(encoding="utf-8")) for path in package_sources()}
    assert {name: uses for name, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "import dill as d", "dist.broadcast_object_list(x)", "torch.load(p)"],
)
def test_the_pickle_guard_sees_each_way_in(source: str) -> None:
    assert pickling_uses(source)
