"""`spec.engine.speculative`: speculative decoding, which verifies drafts of the next tokens."""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from stageline_api.resource.base import SpecBase, cel, cel_extra
from stageline_api.resource.serving import model_source
from stageline_api.runtime_config import SpeculativeConfig

_DRAFT_SOURCES: Final = (model_source.FILE_PATTERN, model_source.HUB_PATTERN, model_source.PACKAGE_PATTERN)
_SOURCE_RULE: Final = (
    "must be file:///dir, hf://org/name[@revision] or pypi://distribution==version/file.gguf; a directory of a volume "
    "of template.volumes is a file:// source"
)
_NEEDS_DRAFT: Final = "is required by method draft: it names the model that drafts"
_ONLY_DRAFT: Final = "is only for method draft"
_ONLY_LOOKUP: Final = "is only for method lookup"
ON_DEVICES_OF_RANKS: Final = (
    "with method draft is not supported for ranks on devices: use lookup, set parallelism.tensor and "
    "parallelism.expert to 1, or engine.device to cpu"
)


def _source(text: str) -> str:
    source = model_source.parse_source(text)
    if isinstance(source, model_source.ClaimSource | model_source.ImageSource):
        raise ValueError(_SOURCE_RULE)
    return text


class DraftSpec(SpecBase):
    """The draft model."""

    source: Annotated[str, AfterValidator(_source)] = Field(
        min_length=1,
        max_length=model_source.LONGEST_SOURCE,
        json_schema_extra=cel_extra(
            cel(
                " || ".join(f"self.matches('{pattern}')".replace("\\", "\\\\") for pattern in _DRAFT_SOURCES),
                _SOURCE_RULE,
            )
        ),
        description=(
            "Source of the draft model: `file:///dir`, `hf://org/name[@revision]` or "
            "`pypi://distribution==version/file.gguf`. It must have the same vocabulary; the last stage holds all of "
            "it. Required."
        ),
    )

    @property
    def parsed_source(self) -> model_source.ModelSource:
        return model_source.parse_source(self.source)


class SpeculativeSpec(SpecBase):
    """Drafts of the next tokens."""

    method: Literal["lookup", "draft"] = Field(
        description=(
            "Source of drafts. `lookup`: n-grams of the request's prompt and output. `draft`: a small model on the "
            "last stage. Required."
        ),
    )
    draft: DraftSpec | None = Field(
        default=None, description="The draft model. Required with method `draft`, not allowed otherwise."
    )
    tokens: int = Field(
        default=SpeculativeConfig.model_fields["tokens"].default,
        ge=1,
        le=16,
        description=(
            "Maximum drafted tokens of one row; the actual number adapts to the acceptance rate. Default 15, between "
            "1 and 16."
        ),
    )
    min_match: int = Field(
        default=SpeculativeConfig.model_fields["min_match"].default,
        ge=1,
        le=8,
        description=(
            "Minimum n-gram length of `lookup`. Shorter n-grams give more drafts, and more wrong ones. Default 1, "
            "between 1 and 8."
        ),
    )
    recent_answers: int = Field(
        default=SpeculativeConfig.model_fields["recent_answers"].default,
        ge=0,
        le=64,
        description=(
            "Finished answers that `lookup` also searches: answers to prompts with the same first 16 tokens and the "
            "same `cache_salt`. Default 0, between 0 and 64."
        ),
    )

    @model_validator(mode="after")
    def _has_its_model(self) -> "SpeculativeSpec":
        if (self.method == "draft") != (self.draft is not None):
            rule = _NEEDS_DRAFT if self.draft is None else _ONLY_DRAFT
            raise PydanticCustomError("at_field", "{rule}", {"at": ("draft",), "rule": rule})
        if self.method != "lookup":
            for field, alias in (("min_match", "minMatch"), ("recent_answers", "recentAnswers")):
                if getattr(self, field) != SpeculativeConfig.model_fields[field].default:
                    raise PydanticCustomError("at_field", "{rule}", {"at": (alias,), "rule": _ONLY_LOOKUP})
        return self

    model_config = ConfigDict(
        json_schema_extra=cel_extra(
            cel("self.method != 'draft' || has(self.draft)", _NEEDS_DRAFT, ".draft"),
            cel("self.method == 'draft' || !has(self.draft)", _ONLY_DRAFT, ".draft"),
            cel("self.method == 'lookup' || !has(self.minMatch) || self.minMatch == 1", _ONLY_LOOKUP, ".minMatch"),
            cel(
                "self.method == 'lookup' || !has(self.recentAnswers) || self.recentAnswers == 0",
                _ONLY_LOOKUP,
                ".recentAnswers",
            ),
        )
    )
