"""docs/models.md lists every own family and every covered family that has a test, and says which is which."""

import ast
from pathlib import Path

from processes.repository_files import ROOT
from stageline_runtime.model_facts.model_config import SUPPORTED_ARCHITECTURES
from stageline_runtime.model_facts.model_coverage import COVERED_ROPE_TYPES

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
COVERED_TEST = Path(__file__).with_name("test_covered_families_equal_hugging_face.py")


def documented() -> dict[str, str]:
    """Path of each family in the table."""
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("|`")]
    return {row[0].strip().strip("`"): row[1].strip() for row in rows}


def covered_families_with_a_test() -> set[str]:
    """Keys of COVERED in the test of covered families, read from its source."""
    for node in ast.parse(COVERED_TEST.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "COVERED":
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key) for key in node.value.keys if key is not None}
    raise AssertionError(f"{COVERED_TEST} has no table COVERED")


def test_the_table_lists_own_and_covered_families_with_a_test() -> None:
    own = dict.fromkeys(SUPPORTED_ARCHITECTURES, "own")
    assert documented() == own | dict.fromkeys(covered_families_with_a_test(), "coverage")


def test_refused_rope_types_are_not_covered() -> None:
    assert not {"dynamic", "longrope"} & COVERED_ROPE_TYPES
