"""The list of vLLM's names in use: it has all that this package imports, and each kind of change is told."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import stageline_vllm
from stageline_vllm.seams import SEAMS, Seam, broken_seams

PACKAGE = Path(str(stageline_vllm.__file__)).parent


def imported_from_vllm() -> Iterator[str]:
    """`module:name` of each import, wherever in a file it stands."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "vllm":
                    yield from (f"{module}:{alias.name}" for alias in names)
                case ast.Import(names=names):
                    yield from (alias.name for alias in names if alias.name.partition(".")[0] == "vllm")


def test_every_name_imported_from_vllm_is_listed() -> None:
    used = set(imported_from_vllm())
    assert len(used) >= 10, used
    assert {name for name in used if not any(f"{seam.path}.".startswith(f"{name}.") for seam in SEAMS)} == set()


@pytest.mark.parametrize(
    ("seam", "told"),
    [
        (Seam("json:JSONDecoder.decode", "", parameters=("s",)), ""),
        (Seam("json:JSONDecoder.decode", "", parameters=("text",)), "takes ('s', '_w'), not ('text',)"),
        (Seam("json:JSONDecoder.nothing", ""), "not there: "),
        (Seam("json.nothing:JSONDecoder", ""), "not there: "),
        (Seam("json:JSONDecoder", "", fields=("decode", "raw_decode")), ""),
        (Seam("json:JSONDecoder", "", fields=("decode", "undo", "redo")), "has no undo, redo"),
        (Seam("os:environ", "", fields=("NO_SUCH_VARIABLE",)), "has no NO_SUCH_VARIABLE"),
        (Seam("json:JSONDecoder", "", attributes_in_source=("strict",)), ""),
        (Seam("json:JSONDecoder", "", attributes_in_source=("lenient",)), "sets no lenient"),
        (Seam("json.decoder", "", phrases=("Expecting value",)), ""),
        (Seam("json.decoder", "", phrases=("Expecting value", "Hoping for the best")), "says no Hoping for the best"),
    ],
    ids=lambda each: each.path if isinstance(each, Seam) else each[:12],
)
def test_what_has_changed_is_told_by_its_name(seam: Seam, told: str) -> None:
    broken = broken_seams([seam])
    if told:
        assert broken[seam.path].startswith(told), broken
    else:
        assert broken == {}
