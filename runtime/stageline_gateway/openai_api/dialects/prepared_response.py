"""A body of `/v1/responses` as the chat that it is, and who writes the answer."""

from collections.abc import Mapping
from typing import Any

from stageline_gateway.openai_api.answer_shapes import Stamp
from stageline_gateway.openai_api.dialects.responses_events import ResponsesDialect
from stageline_gateway.openai_api.dialects.responses_request import (
    RESPONSES_KNOWN,
    ResponsesRequest,
    as_chat,
    client_words,
    fields_without_effect,
    refuse_stored_items,
    without_hints,
    without_repeated,
)
from stageline_gateway.openai_api.translate import Prepared, prepare_as_chat
from stageline_gateway.openai_api.validation import IgnoredFields, checked, settled, with_guide, without_effect


def prepare_response(fields: Mapping[str, Any], strict: bool) -> Prepared:
    ignored: IgnoredFields = {}
    kept = settled(fields, RESPONSES_KNOWN, strict, ignored)
    refuse_stored_items(kept.get("input"))
    # What an answer from here has in its items asks for nothing when it comes back, also where that is strict.
    kept = without_repeated(kept)
    if not strict:
        kept = without_hints(kept, ignored)
    asked = checked(ResponsesRequest, with_guide(kept, strict, ignored))
    without_effect(fields_without_effect(asked), strict, ignored)

    def dialect(stamp: Stamp) -> ResponsesDialect:
        return ResponsesDialect(asked, stamp)

    return prepare_as_chat(as_chat(asked), ignored, strict, "resp", dialect, client_words(asked))
