"""A body of `/v1/messages` as the chat that it is, and who writes the answer."""

from collections.abc import Mapping
from typing import Any

from stageline_gateway.errors import bad_value
from stageline_gateway.openai_api.dialects.messages_events import MessagesDialect
from stageline_gateway.openai_api.dialects.messages_request import (
    MESSAGES_KNOWN,
    MessagesRequest,
    as_chat,
    client_words,
    without_hints,
)
from stageline_gateway.openai_api.translate import Prepared, prepare_as_chat
from stageline_gateway.openai_api.validation import IgnoredFields, checked, settled, with_guide, without_effect


def prepare_message(fields: Mapping[str, Any], strict: bool) -> Prepared:
    ignored: IgnoredFields = {}
    kept = settled(fields, MESSAGES_KNOWN, strict, ignored)
    kept = kept if strict else without_hints(kept, ignored)
    asked = checked(MessagesRequest, with_guide(kept, strict, ignored))
    if asked.thinking is not None and asked.thinking.type == "enabled":
        ignored["thinking"] = None
        if strict:
            message = "'thinking.type' = 'enabled' is not supported: how much a model thinks can't be held to."
            raise bad_value("thinking.type", message, "unsupported_parameter")
    if asked.thinking is not None:
        without_effect({"thinking.display": asked.thinking.display}, strict, ignored)
    return prepare_as_chat(as_chat(asked), ignored, strict, "msg", MessagesDialect, client_words(asked))
