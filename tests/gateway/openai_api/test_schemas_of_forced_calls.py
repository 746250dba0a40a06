"""A forced call has an object for its arguments, and its tool's schema means the same there as by itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from oracles.tokenizer_models import write_byte_level
from stageline_gateway.openai_api.schemas import moved_schema
from stageline_gateway.openai_api.validation import parse_chat
from stageline_runtime.guided.json_grammars import JsonGrammars

SIZE, END = 260, 1
RIGHT, WRONG = {"a": "u"}, {"a": "z"}
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["u"]}},
    "required": ["a"],
    "additionalProperties": False,
}
DEFS = {"$defs": {"A": FORM, "N": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/A"}]}}}
OLD = {"$schema": "http://json-schema.org/draft-07/schema#"}
OTHER = {**FORM, "properties": {"a": {"enum": ["other"]}}}
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": FORM,
    "no type": {key: value for key, value in FORM.items() if key != "type"},
    "or null": FORM | {"type": ["object", "null"]},
    "any of null": {"anyOf": [{"type": "null"}, FORM]},
    "ref": DEFS | {"$ref": "#/$defs/A"},
    "ref to null": DEFS | {"$ref": "#/$defs/N"},
    "constants": {"enum": [None, RIGHT]},
    "old ref": OLD | {"definitions": DEFS["$defs"] | {"N": FORM}, "$ref": "#/definitions/A"},
    "id": DEFS | {"$id": "https://example.com/t.json", "$ref": "#/$defs/A"},
    "id by its name": DEFS | {"$id": "https://example.com/t.json", "$ref": "https://example.com/t.json#/$defs/A"},
    "relative id": DEFS | {"$id": "t.json", "$ref": "t.json#/$defs/A"},
    "old id": OLD | {"$id": "https://example.com/t.json", "definitions": {"A": FORM}, "$ref": "#/definitions/A"},
    "id within": {
        "$defs": {"B": {"$id": "https://example.com/b", "$defs": {"C": FORM}, "$ref": "#/$defs/C"}},
        "$ref": "#/$defs/B",
    },
    "name of a keyword": {
        "type": "object",
        "$defs": {"const": {"enum": ["u"]}},
        "properties": {"a": {"$ref": "#/$defs/const"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("tokenizer"))


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def guide(tools: list[dict[str, Any]], choice: Any) -> str:
    fields = {
        "model": "m",
        "messages": [{"role": "user", "content": "go"}],
        "tools": tools,
        "tool_choice": choice,
    }
    text = parse_chat(fields, {}, False).schema_text
    assert text is not None
    return text


def admits(model_dir: Path, schema: str, answer: Any) -> bool:
    matcher: LLMatcher = JsonGrammars(model_dir, SIZE, [END]).matcher(schema)
    backend = LLTokenizer((model_dir / "tokenizer.json").read_text(), n_vocab=SIZE, eos_token=[END])
    ids = backend.tokenize_str(json.dumps(answer, separators=(",", ":")))
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_arguments_are_objects_of_the_tools_schema(model_dir: Path, parameters: dict[str, Any]) -> None:
    named = guide([tool("f", parameters)], {"type": "function", "function": {"name": "f"}})
    required = guide([tool("g", OTHER), tool("f", parameters)], "required")
    for arguments, is_right in ((RIGHT, True), (WRONG, False), (None, False), ("u", False)):
        assert admits(model_dir, named, arguments) is is_right, (named, arguments)
        assert admits(model_dir, required, [{"name": "f", "arguments": arguments}]) is is_right, (required, arguments)


def test_two_tools_with_one_id_keep_their_own_definitions(model_dir: Path) -> None:
    ids = {"$id": "https://example.com/same", "$ref": "#/$defs/A"}
    schema = guide([tool("f", ids | {"$defs": {"A": FORM}}), tool("g", ids | {"$defs": {"A": OTHER}})], "required")
    for name, said in (("f", "u"), ("g", "other")):
        for value in ("u", "other"):
            call = [{"name": name, "arguments": {"a": value}}]
            assert admits(model_dir, schema, call) is (value == said), (name, value)


def test_data_that_looks_like_a_reference_stays_as_it_is() -> None:
    data = {"$ref": "#/x"}
    schema = json.loads(guide([tool("f", {"properties": {"a": {"const": data, "enum": [data]}}})], "required"))
    arguments = schema["items"]["anyOf"][0]["properties"]["arguments"]
    assert arguments["properties"]["a"] == {"const": data, "enum": [data]}


@pytest.mark.parametrize("keyword", ["properties", "patternProperties", "$defs", "dependentSchemas", "dependencies"])
def test_schemas_by_names_of_keywords_follow_their_document(keyword: str) -> None:
    schema = {keyword: {"enum": {"$ref": "#/$defs/A"}, "$ref": {"items": [{"$ref": "#"}]}}, "const": {"$ref": "#/a"}}
    moved = {keyword: {"enum": {"$ref": "#/x/$defs/A"}, "$ref": {"items": [{"$ref": "#/x"}]}}, "const": {"$ref": "#/a"}}
    assert moved_schema(schema, "#/x") == moved
