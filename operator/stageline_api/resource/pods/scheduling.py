"""`spec.template`'s labels, annotations, affinity and class names, which are passed on to schedulers unchanged."""

from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, WithJsonSchema

from stageline_api.resource.base import SpecBase, cel, cel_extra, check_pattern

PLACEHOLDERS: Final = ("MODEL", "GROUP", "INCARNATION", "STAGE", "STAGES")
"""`$(NAME)` in a label or annotation value is replaced for each pod: gang schedulers need a name for each group. Any
other `$(NAME)` in an annotation is kept; in a label it is refused, because no label may contain it.
"""

_END: Final = rf"([A-Za-z0-9]|\$\(({'|'.join(PLACEHOLDERS)})\))"
LABEL_VALUE_PATTERN: Final = rf"^({_END}(([._-]|{_END})*{_END})?)?$"
CLASS_NAME_PATTERN: Final = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
_KEY_PATTERN: Final = r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
RESERVED_PREFIXES: Final = ("stageline.dev/", "app.kubernetes.io/")
RESERVED_KEY_RULE: Final = "stageline.dev/ and app.kubernetes.io/ keys are set by Stageline itself"
_RESERVED_CEL: Final = cel(
    "self.all(k, " + " && ".join(f"!k.startsWith('{prefix}')" for prefix in RESERVED_PREFIXES) + ")", RESERVED_KEY_RULE
)


def _label_value(value: str) -> str:
    known = ", ".join(f"$({name})" for name in PLACEHOLDERS)
    rule = f"must be a label value: letters, digits, '-', '_' and '.', with a letter or digit at both ends, or {known}"
    return check_pattern(value, LABEL_VALUE_PATTERN, rule)


def _keys(values: dict[str, str]) -> dict[str, str]:
    for key in values:
        check_pattern(key, _KEY_PATTERN, f'"{key}" must be a label key, such as example.com/name')
        if key.startswith(RESERVED_PREFIXES):
            raise ValueError(RESERVED_KEY_RULE)
    return values


def _class_name(name: str) -> str:
    rule = 'must be the name of a Kubernetes object: lower-case letters, digits, "." and "-"'
    return check_pattern(name, CLASS_NAME_PATTERN, rule)


Labels = Annotated[
    dict[
        str,
        Annotated[
            str, Field(max_length=63, json_schema_extra={"pattern": LABEL_VALUE_PATTERN}), AfterValidator(_label_value)
        ],
    ],
    Field(max_length=32, json_schema_extra=cel_extra(_RESERVED_CEL)),
    AfterValidator(_keys),
]
Annotations = Annotated[
    dict[str, Annotated[str, Field(max_length=4096)]],
    Field(max_length=32, json_schema_extra=cel_extra(_RESERVED_CEL)),
    AfterValidator(_keys),
]
ClassName = Annotated[
    str,
    AfterValidator(_class_name),
    Field(min_length=1, max_length=253, json_schema_extra={"pattern": CLASS_NAME_PATTERN}),
]
"""Name of a priority class, a runtime class, a scheduler or a claim."""

RawObject = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]
"""A part of Kubernetes' own pod API, which the API server checks when a pod is created."""


class AffinitySpec(SpecBase):
    """Kubernetes' own affinity rules, passed on unchanged."""

    node_affinity: RawObject | None = Field(
        default=None, description="As a pod's `affinity.nodeAffinity`. Default: none."
    )
    pod_affinity: RawObject | None = Field(
        default=None, description="As a pod's `affinity.podAffinity`. Default: none."
    )
    pod_anti_affinity: RawObject | None = Field(
        default=None,
        description="As a pod's `affinity.podAntiAffinity`, in addition to `placement.spread`. Default: none.",
    )
