"""`spec.placement.gang`: a scheduler that places all pods of a group at once, and the template fields that it sets.

The field excludes what a user could set manually for the same scheduler, so that a pod never has two gangs.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from stageline_api.resource.base import SpecBase, cel, cel_extra, check_pattern
from stageline_api.resource.field_problem import FieldProblem, show_value
from stageline_api.resource.pods.scheduling import CLASS_NAME_PATTERN
from stageline_api.resource.pods.template import TemplateSpec

KUEUE_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
KUEUE_GROUP_LABEL: Final = "kueue.x-k8s.io/pod-group-name"
KUEUE_COUNT_ANNOTATION: Final = "kueue.x-k8s.io/pod-group-total-count"
VOLCANO_GROUP_ANNOTATION: Final = "scheduling.k8s.io/group-name"
KAI_GROUP_ANNOTATION: Final = "pod-group-name"
KAI_NO_GROUPER_ANNOTATION: Final = "kai.scheduler/skip-podgrouper"
OWNED_KEYS: Final = (
    KUEUE_QUEUE_LABEL,
    KUEUE_GROUP_LABEL,
    KUEUE_COUNT_ANNOTATION,
    VOLCANO_GROUP_ANNOTATION,
    KAI_GROUP_ANNOTATION,
    KAI_NO_GROUPER_ANNOTATION,
)
"""Labels and annotations by which pods join a gang; with the field, only the operator sets them."""
SCHEDULER_NAMES: Final = {"volcano": "volcano", "kai": "kai-scheduler"}
"""`schedulerName` of the pods. Kueue only gates pods, and Kubernetes' own gangs use kube-scheduler under any name: for
both the template decides.
"""
POD_REFERENCES: Final = ("schedulingGroup", "workloadRef")
"""Pod fields that join a gang of Kubernetes itself."""

_QUEUE_RULE: Final = "is required with scheduler kueue or kai, which have no default queue"
_NO_QUEUE_RULE: Final = "is not for scheduler kubernetes, which has no queues: leave it out"
_SCHEDULER_RULE: Final = "is decided by placement.gang.scheduler: leave it out"
_OWNED_RULE: Final = "has a label or annotation that placement.gang sets: leave it out, or placement.gang"
_KEY_RULE: Final = "is set by placement.gang: leave it out, or placement.gang"


def _queue(name: str) -> str:
    return check_pattern(
        name, CLASS_NAME_PATTERN, 'must be the name of a queue: lower-case letters, digits, "." and "-"'
    )


class GangSpec(SpecBase):
    """Gang scheduler of a group's pods."""

    scheduler: Literal["volcano", "kai", "kueue", "kubernetes"] = Field(
        description=(
            "`volcano` or `kai` (0.15 or later): the operator creates a PodGroup for each incarnation of a group and "
            "sets the pods' scheduler. `kueue`: pods carry the labels of a plain pod group. `kubernetes`: Kubernetes' "
            "own PodGroup (1.37 or later), which the cluster must have enabled. Required."
        )
    )
    queue: Annotated[str | None, AfterValidator(_queue)] = Field(
        default=None,
        min_length=1,
        max_length=63,
        json_schema_extra={"pattern": CLASS_NAME_PATTERN},
        description=(
            "Queue of the scheduler; a LocalQueue of the namespace for Kueue. Required with `kueue` and `kai`. "
            "Default with `volcano`: its default queue. Not allowed with `kubernetes`."
        ),
    )

    @model_validator(mode="after")
    def _has_a_queue(self) -> "GangSpec":
        if self.queue is None and self.scheduler in ("kai", "kueue"):
            raise PydanticCustomError("at_field", "{rule}", {"at": ("queue",), "rule": _QUEUE_RULE})
        if self.queue is not None and self.scheduler == "kubernetes":
            raise PydanticCustomError("at_field", "{rule}", {"at": ("queue",), "rule": _NO_QUEUE_RULE})
        return self

    model_config = ConfigDict(
        json_schema_extra=cel_extra(
            cel("self.scheduler in ['volcano', 'kubernetes'] || has(self.queue)", _QUEUE_RULE, ".queue"),
            cel("self.scheduler != 'kubernetes' || !has(self.queue)", _NO_QUEUE_RULE, ".queue"),
        )
    )


def _names_none(part: str) -> str:
    named = " || ".join(f"'{key}' in self.template.{part}" for key in OWNED_KEYS)
    return f"!has(self.placement.gang) || !has(self.template.{part}) || !({named})"


GANG_RULES: Final = (
    cel(
        "!has(self.placement.gang) || self.placement.gang.scheduler in ['kueue', 'kubernetes'] || "
        "!has(self.template.schedulerName)",
        _SCHEDULER_RULE,
        ".template.schedulerName",
    ),
    cel(_names_none("labels"), _OWNED_RULE, ".template.labels"),
    cel(_names_none("annotations"), _OWNED_RULE, ".template.annotations"),
)
"""Rules that the API server checks on a spec with the field."""


def gang_problems(gang: GangSpec | None, template: TemplateSpec) -> list[FieldProblem]:
    """Template fields that conflict with the gang."""
    if gang is None:
        return []
    problems = []
    if gang.scheduler in SCHEDULER_NAMES and template.scheduler_name is not None:
        value = show_value(template.scheduler_name)
        problems.append(FieldProblem(path="spec.template.schedulerName", value=value, rule=_SCHEDULER_RULE))
    given: dict[str, Any] = {"labels": template.labels, "annotations": template.annotations}
    metadata, spec = (template.pod_template.get(part) for part in ("metadata", "spec"))
    if isinstance(metadata, dict):
        given |= {f"podTemplate.metadata.{part}": metadata.get(part) for part in ("labels", "annotations")}
    problems += [
        FieldProblem(path=f"spec.template.podTemplate.spec.{name}", value=None, rule=_KEY_RULE)
        for name in POD_REFERENCES
        if isinstance(spec, dict) and name in spec
    ]
    return problems + [
        FieldProblem(path=f"spec.template.{part}[{key}]", value=show_value(texts[key]), rule=_KEY_RULE)
        for part, texts in given.items()
        if isinstance(texts, dict)
        for key in OWNED_KEYS
        if key in texts
    ]
