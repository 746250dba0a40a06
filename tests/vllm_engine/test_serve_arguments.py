"""`engine.extraArgs` against every argument that `vllm serve` knows, as recorded of the supported version.

That the record is true is shown on the real vLLM, in tests/vllm.
"""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from stageline_api.resource.serving.vllm_arguments import OWNED_ARGUMENTS, OWNED_SHORT_ARGUMENTS, argument_problem

RECORD: Final[dict[str, Any]] = json.loads((Path(__file__).parent / "recorded/serve_arguments.json").read_text())


@pytest.mark.parametrize("spelling", ["{}", "{}=1", "{}.key"])
def test_each_argument_is_passed_or_refused_as_was_decided(spelling: str) -> None:
    odd = {name for name in RECORD["refused"] if argument_problem(spelling.format(name)) is None}
    odd |= {name for name in RECORD["passed"] if argument_problem(spelling.format(name)) is not None}
    assert odd == set()


def test_what_is_refused_is_there_in_vllm() -> None:
    assert set(OWNED_ARGUMENTS) | set(OWNED_SHORT_ARGUMENTS) <= set(RECORD["refused"])


def test_no_beginning_reaches_a_refused_argument() -> None:
    """argparse takes a beginning for the whole where only one argument has it."""
    everything = [*RECORD["refused"], *RECORD["passed"]]
    reaching = []
    for name in RECORD["refused"]:
        for length in range(2, len(name)):
            beginning = name[:length]
            candidates = [other for other in everything if other.startswith(beginning)]
            if beginning not in everything and candidates == [name] and argument_problem(beginning) is None:
                reaching.append(beginning)
    assert reaching == []
