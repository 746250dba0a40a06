"""Fields that clients send and this server has no use for, and what becomes of each. Data alone.

`IGNORED`: the answer stays what the client takes it for; the field is left out and named in a header of the answer, or
refused by a gateway that is strict. `REFUSED`: without it the answer would be another than was asked for. Either may
have values that ask for nothing, with which it counts as absent. What is in no table here and no request type is taken
for a slip of the pen and refused: a header would not be read by who wrote `temprature`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final


class Fate(StrEnum):
    """What becomes of a field with a value that asks for something."""

    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Known:
    """One field."""

    fate: Fate
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing; null always does."""
    why: str = ""
    """A sentence for whoever sent a refused one."""


def _ignored(*neutral: Any) -> Known:
    return Known(Fate.IGNORED, neutral)


def _refused(*neutral: Any, why: str = "") -> Known:
    return Known(Fate.REFUSED, neutral, why)


VLLM_KNOWN: Final[Mapping[str, Known]] = MappingProxyType(
    {
        # What changes nothing in the answer.
        "request_id": _ignored(),
        "priority": _ignored(0),
        "spaces_between_special_tokens": _ignored(True),
        "kv_transfer_params": _ignored({}),
        "vllm_xargs": _ignored({}),
        "mm_processor_kwargs": _ignored({}),
        "media_io_kwargs": _ignored({}),
        "ec_transfer_params": _ignored({}),
        "session_id": _ignored(""),
        "stream_interval": _ignored(1),
        "truncation_side": _ignored(),
        "return_token_offsets": _ignored(False),
        "return_mm_kwargs": _ignored(True),
        "routed_experts_prompt_start": _ignored(0),
        "guided_decoding_backend": _ignored("auto"),
        "guided_whitespace_pattern": _ignored(),
        # What does.
        "use_beam_search": _refused(False),
        "length_penalty": _refused(1.0, 1),
        "skip_special_tokens": _refused(True),
        "include_stop_str_in_output": _refused(False),
        "return_tokens_as_token_ids": _refused(False),
        "return_token_ids": _refused(False),
        "truncate_prompt_tokens": _refused(why="A prompt is answered whole or not at all."),
        "logits_processors": _refused([]),
        "logprob_token_ids": _refused([]),
        "repetition_detection": _refused(),
        "return_prompt_text": _refused(False),
        "thinking_token_budget": _refused(-1, why="How much a model thinks can't be held to."),
        "watermarking": _refused(False),
    }
)
"""vLLM's, whose clients send them on every path."""

_COMMON: Final[dict[str, Known]] = {
    "metadata": _ignored({}),
    "store": _ignored(False),
    "service_tier": _ignored("auto", "default"),
    "prompt_cache_retention": _ignored(),
    "prompt_cache_key": _ignored(""),
    "user": _ignored(""),
    "safety_identifier": _ignored(""),
    "best_of": _refused(1),
} | dict(VLLM_KNOWN)

CHAT_KNOWN: Final[Mapping[str, Known]] = MappingProxyType(
    _COMMON
    | {
        "verbosity": _ignored(),
        "prediction": _ignored(),
        "moderation": _ignored(),
        "prompt_cache_options": _ignored(),
        "include_reasoning": _ignored(True),
        "chat_template_content_format": _ignored("auto", "string"),
        "functions": _refused([], why="Send them as 'tools'."),
        "function_call": _refused("none", why="Send it as 'tool_choice'."),
        "modalities": _refused(["text"]),
        "audio": _refused(),
        "web_search_options": _refused(),
        "documents": _refused([]),
        "echo": _refused(False),
        "add_special_tokens": _refused(False),
        "chat_template": _refused(why="The template is the model's own."),
    }
)
"""Of `/v1/chat/completions`."""

COMPLETION_KNOWN: Final[Mapping[str, Known]] = MappingProxyType(
    _COMMON
    | {
        "suffix": _refused(""),
        "add_special_tokens": _refused(True),
        "prompt_embeds": _refused(),
        "response_format": _refused({"type": "text"}, why="Send it as 'structured_outputs'."),
    }
)
"""Of `/v1/completions`."""

MESSAGE_IGNORED: Final = frozenset(
    {
        "name",
        "id",
        "annotations",
        "refusal",
        "cache_control",
        "provider_specific_fields",
        "parsed",
        "thinking_blocks",
        "reasoning_items",
        "reasoning_details",
    }
)
"""Of a message: what answers of this and other servers have, and what client libraries add to them. Roles that take a
name keep it."""
REASONING: Final = ("reasoning", "reasoning_content")
"""What an assistant's message thought, where it is text; ignored otherwise."""
CALL_IGNORED: Final = frozenset({"index", "extra_content", "provider_specific_fields", "cache_control"})
"""Of a call in an assistant's message; `index` is left of a stream's chunks."""
CALLED_FUNCTION_IGNORED: Final = frozenset({"parsed_arguments", "provider_specific_fields"})
"""Of the function that such a call names."""
_TOOL_HINTS: Final = frozenset(
    {"cache_control", "defer_loading", "allowed_callers", "eager_input_streaming", "input_examples"}
)
TOOL_IGNORED: Final = _TOOL_HINTS
"""Of a tool."""
FUNCTION_IGNORED: Final = _TOOL_HINTS
"""Of a tool's function."""
PART_IGNORED: Final = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Of a part of a message's content."""
GUIDED: Final[Mapping[str, str]] = MappingProxyType(
    {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
)
"""vLLM's older names of what `structured_outputs` holds."""
GUIDE_IGNORED: Final = frozenset(
    {"disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "backend"}
)
"""Of `structured_outputs`."""
STREAM_IGNORED: Final = frozenset({"include_obfuscation", "continuous_usage_stats"})
"""Of `stream_options`."""
