"""An explicit cut (`stages[].layers`): parses the ranges and checks them against each other and the model. Pure.

Layers are counted from zero and a range includes both ends: `0-14` is fifteen layers. Together the ranges must be
0..n-1, each layer in exactly one stage, in stage order.
"""

import re
from collections.abc import Sequence
from typing import Final

from stageline_api.runtime_config import LayerRange

LAYERS_PATTERN: Final = r"^[0-9]{1,4}-[0-9]{1,4}$"


def parse_layer_range(text: str) -> LayerRange:
    """Parse `first-last`; raises ValueError with the rule for anything else, or if first is above last."""
    if not re.fullmatch(LAYERS_PATTERN, text, re.ASCII):
        raise ValueError('must be a range of layers, first-last with both ends included, as in "0-14"')
    first, last = (int(part) for part in text.split("-"))
    if first > last:
        raise ValueError(f"the first layer must not be above the last: write {last}-{first}")
    return LayerRange(first=first, last=last)


def range_problems(ranges: Sequence[LayerRange | None]) -> list[tuple[int, str]]:
    """Problems between stages, as (stage index, rule). No ranges at all is allowed: the engine cuts."""
    if all(each is None for each in ranges):
        return []
    absent = [index for index, each in enumerate(ranges) if each is None]
    if absent:
        return [(index, "is missing: when one stage gives layers, every stage must") for index in absent]
    problems: list[tuple[int, str]] = []
    expected = 0
    for index, each in enumerate(ranges):
        assert each is not None
        rule = _start_problem(index, each.first, expected)
        if rule is not None:
            problems.append((index, rule))
        expected = each.last + 1
    return problems


def end_problem(last_layer: int, num_layers: int) -> str | None:
    """Why the last stage's last layer does not fit a model of `num_layers` layers, or None."""
    final = num_layers - 1
    if last_layer == final:
        return None
    if last_layer > final:
        return f"the model has {num_layers} layers, so the last stage must end at layer {final}"
    missing = _layers(last_layer + 1, final)
    return f"{missing} missing: the model has {num_layers} layers, so the last stage must end at layer {final}"


def _start_problem(index: int, first: int, expected: int) -> str | None:
    if first == expected:
        return None
    if index == 0:
        return f"{_layers(0, first - 1)} missing: the first stage must start at layer 0"
    if first > expected:
        return (
            f"{_layers(expected, first - 1)} missing: must start at layer {expected}, right after stages[{index - 1}]"
        )
    return f"overlaps stages[{index - 1}], which ends at layer {expected - 1}: must start at layer {expected}"


def _layers(first: int, last: int) -> str:
    return f"layer {first} is" if first == last else f"layers {first} to {last} are"
