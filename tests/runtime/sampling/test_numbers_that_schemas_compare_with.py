"""Whole numbers of a schema are followed exactly, or the schema is refused by the number's place."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from oracles.tokenizer_models import write_byte_level
from stageline_runtime.guided.json_grammars import GrammarError, JsonGrammars

SIZE, END = 260, 1
EXACT = 2**53


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))


def admits(model_dir: Path, schema: dict[str, Any], answer: str) -> bool:
    matcher: LLMatcher = JsonGrammars(model_dir, SIZE, [END]).matcher(json.dumps(schema))
    ids = LLTokenizer((model_dir / "tokenizer.json").read_text(), n_vocab=SIZE, eos_token=[END]).tokenize_str(answer)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": EXACT + 1}, "#/const: the number 9007199254740993 is"),
        ({"enum": ["a", 1234567890123456789]}, "#/enum: the number 1234567890123456789 is"),
        ({"enum": [{"id": [-EXACT - 1]}]}, "#/enum"),
        ({"type": "object", "properties": {"id": {"const": 2**60}}}, "#/properties/id/const"),
        ({"type": "object", "properties": {"enum": {"minimum": EXACT + 3}}}, "#/properties/enum/minimum"),
        ({"$defs": {"const": {"maximum": -EXACT - 1}}, "$ref": "#/$defs/const"}, "#/$defs/const/maximum"),
        ({"anyOf": [{"type": "null"}, {"exclusiveMaximum": 2**64 - 1}]}, "#/anyOf/1/exclusiveMaximum"),
        ({"type": "array", "items": {"multipleOf": EXACT + 2}}, "#/items/multipleOf"),
        ({"const": 2.0**53 + 2}, "#/const: the number 9007199254740994.0 is"),
        ({"maximum": 1e300}, "#/maximum"),
        ({"const": 10**5000}, "of that length"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_float64_has_not_is_refused_by_place(model_dir: Path, schema: dict[str, Any], place: str) -> None:
    written = json.dumps(schema) if place != "of that length" else '{"const": 1' + "0" * 5000 + "}"
    with pytest.raises(GrammarError) as refusal:
        JsonGrammars(model_dir, SIZE, [END]).matcher(written)
    assert place in str(refusal.value)


@pytest.mark.parametrize("number", [EXACT, -EXACT, EXACT - 1, 0, 123456789])
def test_what_float64_has_is_followed(model_dir: Path, number: int) -> None:
    assert admits(model_dir, {"const": number}, str(number))
    assert not admits(model_dir, {"const": number}, str(number + 1))
    assert admits(model_dir, {"type": "integer", "maximum": number}, str(number))
    assert not admits(model_dir, {"type": "integer", "maximum": number}, str(number + 1))


def test_the_bound_of_int64_is_taken(model_dir: Path) -> None:
    bound = {"type": "integer", "maximum": 2**63 - 1}
    assert admits(model_dir, bound, str(2**63 - 1))
    assert not admits(model_dir, bound, str(2**63))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "default": EXACT + 1, "examples": [EXACT + 1]},
        {"type": "object", "properties": {"const": {"type": "integer"}}, "default": {"const": EXACT + 1}},
        {"enum": [True, 1.5, "9007199254740993"]},
    ],
    ids=["default", "named const", "no whole numbers"],
)
def test_numbers_that_nothing_is_compared_with_are_left_alone(model_dir: Path, schema: dict[str, Any]) -> None:
    assert JsonGrammars(model_dir, SIZE, [END]).matcher(json.dumps(schema)) is not None
