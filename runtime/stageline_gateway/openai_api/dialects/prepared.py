"""Bodies of `/v1/messages` and `/v1/responses` as the chats that they are, and who writes the answers."""

from collections.abc import Mapping
from typing import Any

from stageline_gateway.errors import bad_value
from stageline_gateway.openai_api.answer_shapes import Stamp
from stageline_gateway.openai_api.checked_types import checked
from stageline_gateway.openai_api.dialects import messages_request, responses_request
from stageline_gateway.openai_api.dialects.messages_events import MessagesDialect
from stageline_gateway.openai_api.dialects.responses_events import ResponsesDialect
from stageline_gateway.openai_api.translate import Prepared, prepare_as_chat
from stageline_gateway.openai_api.validation import IgnoredFields, settled, with_guide, without_effect


def prepare_message(fields: Mapping[str, Any], strict: bool) -> Prepared:
    ignored: IgnoredFields = {}
    kept = settled(fields, messages_request.MESSAGES_KNOWN, strict, ignored)
    kept = messages_request.with_text_read(kept)
    kept = kept if strict else messages_request.without_hints(kept, ignored)
    asked = checked(messages_request.MessagesRequest, with_guide(kept, strict, ignored))
    without_effect(asked.left_out, strict, ignored)
    if asked.thinking is not None and asked.thinking.type == "enabled":
        ignored["thinking"] = None
        if strict:
            rule = "= 'enabled' is not supported: how much a model thinks can't be held to"
            raise bad_value("thinking.type", rule, "unsupported_parameter")
    if asked.thinking is not None:
        without_effect({"thinking.display": asked.thinking.display}, strict, ignored)
    return prepare_as_chat(
        messages_request.as_chat(asked), ignored, strict, "msg", MessagesDialect, messages_request.client_names(asked)
    )


def prepare_response(fields: Mapping[str, Any], strict: bool) -> Prepared:
    ignored: IgnoredFields = {}
    kept = settled(fields, responses_request.RESPONSES_KNOWN, strict, ignored)
    responses_request.refuse_stored_items(kept.get("input"))
    # What an answer from here has in its items asks for nothing when it comes back, also where that is strict.
    kept = responses_request.without_repeated(kept)
    if not strict:
        kept = responses_request.without_hints(kept, ignored)
    asked = checked(responses_request.ResponsesRequest, with_guide(kept, strict, ignored))
    without_effect(responses_request.fields_without_effect(asked), strict, ignored)

    def dialect(stamp: Stamp) -> ResponsesDialect:
        return ResponsesDialect(asked, stamp)

    return prepare_as_chat(
        responses_request.as_chat(asked), ignored, strict, "resp", dialect, responses_request.client_names(asked)
    )
