"""JSON values of clients as msgspec's structs, or the one error that names what is wrong with them.

Types are never coerced and an unknown field is refused. msgspec reports a rule and a path, as a text; the value is
looked up there. Errors name one field, whatever else is wrong.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Final, TypeVar

import msgspec
from msgspec import NODEFAULT, Struct, inspect, structs

from stageline_gateway.errors import ApiError, bad_value, shown, wrong_value
from stageline_gateway.openai_api.unread_parts import Unread, is_media


class Strict(Struct, frozen=True, forbid_unknown_fields=True):
    """An object of a request."""


class OneOf:
    """A value that is one of several structs, which a subclass names by looking at it."""

    kinds: ClassVar[str] = ""
    """What a value of no kind should have been."""

    @classmethod
    def struct_of(cls, value: Any) -> type[Strict | Unread] | None:
        """The type that `value` is to be checked as; None for a value of no kind."""
        raise NotImplementedError

    @classmethod
    def structs(cls) -> list[type[Struct]]:
        """All that it may be."""
        found: list[type[Struct]] = []
        for one in cls.__subclasses__():
            found += [one] if issubclass(one, Struct) else one.structs()
        return found


StructType = TypeVar("StructType", bound=Struct)
_UNKNOWN: Final = "Object contains unknown field `"
_MISSING: Final = "Object missing required field `"
_PATH: Final = re.compile(r" - at `\$([^`]*)`$")
_ENTRY: Final = re.compile(r" - at (?:`key` in `\$\.(?=\w+`$)|`\$\.(?=\w+\[))(\w+)(?:\[\.\.\.\])?`$")
_STEP: Final = re.compile(r"\[(\d+)\]|\.(\w+)")
_UNIT: Final = {"str": "characters", "array": "items", "object": "fields"}
_NAMES: Final = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_EXPECTED: Final = re.compile(r"Expected `([^`]*)`(?:, got `(\w+)`| (.*))?$", re.DOTALL)
_BOUNDS: Final = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


_type_info: Final = cache(inspect.type_info)


@cache
def optional_fields(model: type[Struct]) -> Mapping[str, Any]:
    """The client's names of fields that may be left out -> what they are then."""
    return {
        one.encode_name: one.default if one.default_factory is NODEFAULT else one.default_factory()
        for one in structs.fields(model)
        if not one.required
    }


def checked(model: type[StructType], fields: Mapping[str, Any]) -> StructType:
    """`fields` as a `model`; raises ApiError 400 naming the first field that is wrong."""
    # OpenAI's clients may send null for any optional field.
    optional = optional_fields(model)
    given = {name: value for name, value in fields.items() if value is not None or name not in optional}
    try:
        return msgspec.convert(given, model, dec_hook=_one_of)
    except msgspec.ValidationError as error:
        raise _as_api_error(str(error), model, given) from None


def _one_of(kind: type, value: Any) -> Any:
    assert issubclass(kind, OneOf)
    struct = kind.struct_of(value)
    if struct is None:
        raise ValueError(f"should be {kind.kinds}")
    tag = struct.__struct_config__.tag_field  # msgspec requires it in unions only
    if tag is not None and isinstance(value, Mapping) and tag not in value:
        raise ValueError(f"{_MISSING}{tag}`")
    try:
        return msgspec.convert(value, struct, dec_hook=_one_of)
    except msgspec.ValidationError as error:
        rule, path = _split(str(error), value)
        # msgspec appends the path of `value`. The length says where this one ends.
        raise ValueError(f"{len(path)} {path}{rule}") from None


def _split(text: str, value: Any) -> tuple[str, str]:
    """msgspec's rule, and the path to it within `value`. A rule may quote a client's text that looks like a path."""
    length, _, rest = text.partition(" ")
    inner = ""
    if length.isdecimal():
        inner, text = rest[: int(length)], rest[int(length) :]
    elif text.startswith(_UNKNOWN) and text.removeprefix(_UNKNOWN).removesuffix("`") in value:
        return text, ""
    found = _PATH.search(text)
    return (text, inner) if found is None else (text[: found.start()], found[1] + inner)


def _as_api_error(text: str, model: type[Struct], fields: Mapping[str, Any]) -> ApiError:
    # Only these hold no text of the client's, which may look like a path.
    if text.startswith("Expected ") and (entry := _ENTRY.search(text)) is not None:
        return _wrong_entry(entry[1], model, fields[entry[1]])
    text, path = _split(text, fields)
    steps = [int(index) if index else name for index, name in _STEP.findall(path)]
    for start, code, rule in (
        (_MISSING, "missing_required_parameter", "is missing"),
        (_UNKNOWN, "unknown_parameter", "is not a known field"),
    ):
        if text.startswith(start):
            return bad_value(field_path([*steps, text.removeprefix(start).removesuffix("`")]), rule, code)
    param, value = field_path(steps), _value_at(steps, fields)
    if not text.startswith("Invalid "):
        rule, is_type = _rule(text)
        return wrong_value(param, rule, value, "invalid_type" if is_type else "invalid_value")
    words = " or ".join(map(shown, dict.fromkeys(_words(_type_info(model), steps))))
    why = ", as the models served here read text alone" if steps[-1:] == ["type"] and is_media(value) else ""
    return wrong_value(param, f"should be {words}{why}", value)


def _wrong_entry(name: str, model: type[Struct], entries: Mapping[str, Any]) -> ApiError:
    """The error of the first wrong entry of the dictionary `name`: msgspec doesn't say which key it has."""
    kind = next(one.type for one in structs.fields(model) if one.encode_name == name)
    for key, value in entries.items():
        try:
            msgspec.convert({key: value}, kind)
        except msgspec.ValidationError as error:
            rule, is_type = _rule(str(error).partition(" - at ")[0])
            is_of_key = "`key`" in str(error)
            code = "invalid_type" if is_type else "invalid_value"
            at = field_path([name, key])
            return (
                wrong_value(at, f"has a key that {rule}", key, code)
                if is_of_key
                else wrong_value(at, rule, value, code)
            )
    raise AssertionError(f"no entry of {name} is wrong")


def _rule(text: str) -> tuple[str, bool]:
    """msgspec's rule in the words of JSON, and whether it is of types."""
    if (found := _EXPECTED.match(text)) is None:
        return (text, True) if text.startswith("should be") else (f"is wrong: {text.lower()}", False)
    names, got, bound = found.groups()
    kinds = [_NAMES[name] for name in names.split(" | ") if name != "null" or names == "null"]
    if bound is None:
        *others, last = kinds
        return "should be " + (f"{', '.join(others)} or {last}" if others else last), got is not None
    if bound.startswith("matching regex "):
        return f"should match the pattern {bound.removeprefix('matching regex ')}", False
    sign, _, limit = bound.removeprefix("of length ").partition(" ")
    if not bound.startswith("of length "):
        return f"should be {_BOUNDS[sign]} {limit}", False
    return f"should have {_BOUNDS[sign]} {limit} {_UNIT[names]}", False


def _value_at(steps: list[str | int], value: Any) -> Any:
    for step in steps:
        try:
            value = value[step]
        except (LookupError, TypeError):
            return getattr(value, str(step), None)
    return value


def _words(info: inspect.Type, steps: list[str | int]) -> Iterator[Any]:
    """The words that may be at `steps` of what has the type `info`."""
    match info:
        case inspect.UnionType(types=types):
            for member in types:
                yield from _words(member, steps)
        case inspect.LiteralType(values=values) if not steps:
            yield from values
        case inspect.ListType(item_type=item) if steps:
            yield from _words(item, steps[1:])
        case inspect.CustomType(cls=cls) if issubclass(cls, OneOf):
            for struct in cls.structs():
                yield from _words(_type_info(struct), steps)
        case inspect.Metadata(type=inner):
            yield from _words(inner, steps)
        case inspect.StructType(tag_field=tag_field, tag=tag) if steps == [tag_field]:
            yield tag
        case inspect.StructType(fields=fields) if steps:
            for field in fields:
                if field.encode_name == steps[0]:
                    yield from _words(field.type, steps[1:])
        case _:
            return


def field_path(steps: list[str | int]) -> str:
    """A path as OpenAI writes it, `messages[0].content`, cut where an error would be too long."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
    return path if len(path) <= 200 else path[:200] + "…"
