"""`metadata` of a PipelineModel: what a person writes and what `kubectl get -o yaml` adds."""

from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from stageline_api.resource.base import check_pattern

LONGEST_NAME: Final = 40
NAME_PATTERN: Final = r"^[a-z]([a-z0-9-]*[a-z0-9])?$"
NAME_RULE: Final = 'must be lower-case letters, digits and "-", starting with a letter and not ending with "-"'
LENGTH_RULE: Final = (
    f"must be at most {LONGEST_NAME} characters, because pod names add group, incarnation and stage to it and "
    "Kubernetes ends at 63"
)


def _name(name: str) -> str:
    if len(name) > LONGEST_NAME:
        raise ValueError(LENGTH_RULE)
    return check_pattern(name, NAME_PATTERN, NAME_RULE)


def _namespace(name: str) -> str:
    rule = 'must be the name of a namespace: at most 63 lower-case letters, digits and "-"'
    return check_pattern(name, r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", rule)


class Metadata(BaseModel):
    """Name and bookkeeping. Fields that only the API server writes are accepted and not read."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel)

    name: Annotated[str, AfterValidator(_name)]
    namespace: Annotated[str, AfterValidator(_namespace)] = "default"
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    uid: str | None = None
    generation: int | None = None
    resource_version: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    generate_name: str | None = None
    finalizers: list[str] = []
    owner_references: list[dict[str, Any]] = []
    managed_fields: list[dict[str, Any]] = []
    self_link: str | None = None
