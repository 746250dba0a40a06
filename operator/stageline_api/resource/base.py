"""Base of all types of the PipelineModel: camelCase names, unknown fields refused, no coercion between types.

`"2"` is not an integer and neither is `true`. An omitted field gets its default. An explicit null is refused, as the
API server does, so that a file means the same here and in a cluster.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator
from pydantic.alias_generators import to_camel

CEL_RULES: Final = "x-kubernetes-validations"
"""JSON schema key of a field's CEL rules, which the API server checks."""

_QUANTITY: Final = r"^[0-9]{1,15}(\.[0-9]{1,9})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"


class SpecBase(BaseModel):
    """Base of the types that users write."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_null(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("leave the field out to get its default")
        return value

    @classmethod
    def read_accepted(cls, value: Any) -> Self:
        """Read a value that an API server has accepted: unknown fields belong to a newer version.

        Raises `ValidationError`.
        """
        return cls.model_validate(value, extra="ignore")


def cel(rule: str, message: str, field_path: str | None = None) -> dict[str, Any]:
    """One rule for `x-kubernetes-validations`; `kubectl apply` prints `message`."""
    described: dict[str, Any] = {"rule": rule, "message": message}
    return described if field_path is None else described | {"fieldPath": field_path}


def cel_exactly_one(fields: Sequence[str], message: str) -> dict[str, Any]:
    """The rule that an object has exactly one of these fields."""
    return cel(f"[{', '.join(f'has(self.{each})' for each in fields)}].filter(given, given).size() == 1", message)


def cel_extra(*rules: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """`json_schema_extra` of a field or type with CEL rules."""
    return {CEL_RULES: list(rules), **extra}


def check_pattern(text: str, pattern: str, rule: str) -> str:
    """Return `text`, or raise ValueError with a readable rule instead of the pattern."""
    if not re.fullmatch(pattern, text, re.ASCII):
        raise ValueError(rule)
    return text


def check_absolute_path(path: str) -> str:
    """Return an absolute POSIX path, or raise ValueError."""
    segments = path.split("/")
    if not path.startswith("/") or ".." in segments or not path.isprintable():
        raise ValueError('must be an absolute path without ".."')
    return path


def _quantity(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError('must be a quantity: an integer, or a quoted string such as "500m" or "8Gi"')
    return check_pattern(str(value), _QUANTITY, 'must be a quantity such as 2, "500m" or "8Gi"')


Quantity = Annotated[
    str,
    BeforeValidator(_quantity),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": _QUANTITY}),
]
"""An amount of a resource in Kubernetes' notation; an integer becomes its decimal text."""

ShortText = Annotated[str, Field(max_length=253)]
"""A name, key or label value within Kubernetes' usual length limit."""
