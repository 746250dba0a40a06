"""What a client may hold an answer's text to: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
import re
from typing import Annotated, Any, Final, Literal, assert_never

from msgspec import Meta, field, structs

from stageline_api.engine_http import MAX_GRAMMAR_CHARACTERS, MAX_REGEX_CHARACTERS
from stageline_gateway.openai_api.checked_types import Strict

MAX_GUIDED_CHOICES: Final = 1024
_REGEX_SIGNS: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


class JsonSchemaFormat(Strict, kw_only=True, frozen=True):
    """A schema that the answer satisfies, whether or not `strict` is set; `name` and `description` change nothing."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] = field(name="schema")
    strict: bool | None = None


class ResponseFormat(Strict, frozen=True):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @property
    def schema_text(self) -> str | None:
        """The JSON schema to satisfy, as JSON; None for free text."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return '{"type":"object"}'
            case "json_schema":
                return json.dumps(self.json_schema.json_schema if self.json_schema else {})
            case _:
                assert_never(self.type)


Choice = Annotated[str, Meta(min_length=1)]


class StructuredOutputs(Strict, frozen=True):
    """vLLM's: what the answer's text must be, by exactly one of these."""

    json_schema: dict[str, Any] | str | None = field(default=None, name="json")
    json_object: Annotated[bool, Meta(extra_json_schema={"const": True})] | None = None
    regex: Annotated[str, Meta(min_length=1, max_length=MAX_REGEX_CHARACTERS)] | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)] | None = None
    choice: Annotated[list[Choice], Meta(min_length=1, max_length=MAX_GUIDED_CHOICES)] | None = None

    @property
    def schema_text(self) -> str | None:
        """The JSON schema to satisfy, as JSON."""
        if self.json_object:
            return '{"type":"object"}'
        if self.json_schema is None or isinstance(self.json_schema, str):
            return self.json_schema
        return json.dumps(self.json_schema)

    @property
    def regex_text(self) -> str | None:
        """The expression that the answer matches as a whole."""
        if self.choice is None:
            return self.regex
        return "|".join(_REGEX_SIGNS.sub(r"\\\g<0>", choice) for choice in self.choice)

    @property
    def is_too_long(self) -> bool:
        """Whether the expression is. Texts to choose from are added up before one is made: each sign in them becomes a
        string of its own on the way."""
        characters = sum(map(len, self.choice or ()))
        return characters > MAX_REGEX_CHARACTERS or len(self.regex_text or "") > MAX_REGEX_CHARACTERS

    @property
    def named(self) -> list[str]:
        """What of it is given, by the client's names."""
        return [one.encode_name for one in structs.fields(self) if getattr(self, one.name) is not None]
