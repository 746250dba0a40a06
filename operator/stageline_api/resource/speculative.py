"""`spec.engine.speculative`: whether drafts of the next tokens are verified along with the newest one."""

from typing import Annotated, Final

from pydantic import AfterValidator, Field

from stageline_api.resource.base import SpecBase, cel, cel_extra
from stageline_api.runtime_config import SpeculativeConfig

_ONE_METHOD: Final = 'must be "lookup": drafts by a second model are not built yet'
ON_DEVICES: Final = "is not built for devices yet: leave it out, or set engine.device to cpu"


def _method(name: str) -> str:
    if name != "lookup":
        raise ValueError(_ONE_METHOD)
    return name


class SpeculativeSpec(SpecBase):
    """Drafts of the next tokens."""

    method: Annotated[str, AfterValidator(_method)] = Field(
        max_length=63,
        json_schema_extra=cel_extra(cel("self == 'lookup'", _ONE_METHOD)),
        description=(
            "Where drafts come from. Required; only value so far: `lookup`, what followed the same few tokens before, "
            "in the request's own prompt and output."
        ),
    )
    tokens: int = Field(
        default=SpeculativeConfig.model_fields["tokens"].default,
        ge=1,
        le=16,
        description=(
            "Most drafts of one row. How many a row carries up to this adapts to how many hold. Default 15: with the "
            "newest token they make 16, a size that steps are padded to anyway. Between 1 and 16."
        ),
    )
    min_match: int = Field(
        default=SpeculativeConfig.model_fields["min_match"].default,
        ge=1,
        le=8,
        description=(
            "Fewest tokens at the end of what is known that must have been seen before for a draft. Fewer find more "
            "drafts, and more wrong ones; what follows one token is judged apart from what follows several. Default 1, "
            "between 1 and 8."
        ),
    )
