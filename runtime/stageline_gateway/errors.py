"""Errors as OpenAI's clients expect them: a status and `{"error": {"message", "type", "param", "code"}}`.

Every refusal in the gateway is an `ApiError`, made by one of the functions here, so that each kind of failure has one
status and one code. Messages are for the client: they name the field, the value and the rule, and never hold an
address inside the cluster.
"""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Self, assert_never

from stageline_api.engine_http import ContextExceeded, EngineError, ErrorCode
from stageline_gateway.engine_key import KEY_NOT_TAKEN

SHOWN_CHARACTERS = 100
"""How much of a client's own value an error repeats."""


class _Json(reprlib.Repr):
    """Values in JSON's words, cut."""

    def repr_str(self, x: str, _level: int) -> str:
        return json.dumps(x[: self.maxstring], ensure_ascii=False)

    def repr_bool(self, x: bool, _level: int) -> str:
        return "true" if x else "false"

    def repr_NoneType(self, _x: None, _level: int) -> str:  # noqa: N802 - the type's name
        return "null"


_BOUNDED = _Json()
_BOUNDED.maxlevel = 8
_BOUNDED.maxlist = _BOUNDED.maxdict = SHOWN_CHARACTERS
_BOUNDED.maxstring = _BOUNDED.maxlong = _BOUNDED.maxother = 2 * SHOWN_CHARACTERS


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal. Not frozen, since Python writes tracebacks to it.

    `retry_after_seconds` becomes the `Retry-After` header; None means trying again will not help.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_seconds: float | None = None
    extra_headers: Mapping[str, str] = field(default_factory=dict)
    exceeded: ContextExceeded | None = None
    """Of a prompt that is too long, the numbers of the message."""
    rule: str | None = None
    """What the message says of the field `param`; None where the message is a sentence of its own."""
    other: str | None = None
    """The path of another field, with which the rule ends."""

    def renamed(self, name_of: Callable[[str], str]) -> Self:
        """The same with the client's names of fields; `name_of` gives them for paths of the gateway's own."""
        if self.param is None:
            return self
        param, other = name_of(self.param), None if self.other is None else name_of(self.other)
        if self.rule is not None:
            return replace(self, param=param, other=other, message=_sentence(param, self.rule, other))
        # An engine's sentence, in words of its own.
        return self if param == self.param else replace(self, param=param, message=f"'{param}': {self.message}")

    def bare(self) -> Self:
        """The same without its traceback, for a frame that keeps it. The traceback holds the frames that it was raised
        through, with what a request's body was parsed to. Where one of them holds the error, all of that would wait for
        the garbage collector."""
        return self.with_traceback(None)

    def body(self) -> dict[str, Any]:
        """The JSON body of the response, also the data of an error event."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = dict(self.extra_headers)
        if self.retry_after_seconds is not None:
            headers["retry-after"] = str(max(1, ceil(self.retry_after_seconds)))
        return headers


def shown(value: object) -> str:
    """`value` as it may appear in a message: in JSON's words, a text in single quotes as names are, cut to
    `SHOWN_CHARACTERS`. Quick however large the value is."""
    text = repr(value[: SHOWN_CHARACTERS + 1]) if isinstance(value, str) else _BOUNDED.repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def bad_value(param: str, rule: str, code: str = "invalid_value", other: str | None = None) -> ApiError:
    """400: a field whose type or value breaks a rule. The message is the field's name and the `rule`, which may end
    with the name of the field `other`."""
    return ApiError(400, _sentence(param, rule, other), param=param, code=code, rule=rule, other=other)


def wrong_value(param: str, rule: str, value: object, code: str = "invalid_value") -> ApiError:
    """The same, of a rule that `value` breaks."""
    return bad_value(param, f"{rule}; got {shown(value)}", code)


def _sentence(param: str, rule: str, other: str | None) -> str:
    ending = "" if other is None else f" '{other}'"
    return f"'{param}' {rule}{ending}."


def model_not_found(model: str) -> ApiError:
    """404: no group of this name is known, ready or not."""
    return ApiError(404, f"The model {shown(model)} is not served here.", param="model", code="model_not_found")


def model_ambiguous(asked: str, full_names: Sequence[str]) -> ApiError:
    """400: a bare name that models of several namespaces have."""
    choices = " or ".join(f"'{name}'" for name in full_names)
    message = f"Several namespaces serve a model {shown(asked)}: ask for {choices}."
    return ApiError(400, message, param="model", code="model_ambiguous")


def not_supported(message: str) -> ApiError:
    """400: an endpoint of OpenAI's that the models served here have no answer for."""
    return ApiError(400, message, code="unsupported_endpoint")


def not_stored(what: str) -> ApiError:
    """404: what a client was given an id of, and can't get back."""
    return ApiError(404, f"No {what} is stored here: an answer is given once.", code="not_found")


def not_ready(message: str, retry_after_seconds: float) -> ApiError:
    """503: the request is fine, and may succeed later."""
    return ApiError(503, message, "server_error", code="not_ready", retry_after_seconds=retry_after_seconds)


def model_suspended(model: str) -> ApiError:
    """503 at once, without a time to come back at: only a person ends it."""
    message = f"Model '{model}' is suspended: it takes no request until spec.suspend of its PipelineModel is false."
    return ApiError(503, message, "server_error", code="model_suspended")


def answer_broken(message: str) -> ApiError:
    """502: the engine failed after it had begun to answer."""
    return ApiError(502, message, "server_error", code="engine_failed")


def answer_failed(message: str) -> ApiError:
    """400: what was asked can't be answered to its end, as shows only while it is; asking again would not help."""
    return ApiError(400, message, code="answer_failed")


def revision_replaced(window_seconds: float, retry_after_seconds: float) -> ApiError:
    """503: an answer outlived the drain of the last group that could have gone on with it."""
    message = (
        "The model was replaced by another revision while it answered, and no group of the old one came back within "
        f"{window_seconds:g} s. Ask again: the new revision answers from the beginning."
    )
    return ApiError(503, message, "server_error", code="revision_replaced", retry_after_seconds=retry_after_seconds)


def gateway_failed() -> ApiError:
    """500: a bug in the gateway."""
    return ApiError(500, "The gateway failed; its log says why.", "server_error", code="internal")


def refused_by_engine(error: EngineError, default_param: str, retry_after_seconds: float) -> ApiError:
    """The engine's refusal in OpenAI's words. `default_param` is the prompt's field in the client's request."""
    match error.code:
        case ErrorCode.INVALID_VALUE:
            return ApiError(400, error.message, param=error.param or default_param, code="invalid_value")
        case ErrorCode.CONTEXT_LENGTH_EXCEEDED | ErrorCode.NO_CHAT_TEMPLATE:
            param, code, said = error.param or default_param, error.code.value, error.exceeded
            if said is None or said.max_tokens is None or said.prompt_tokens is None:
                return ApiError(400, error.message, param=param, code=code, exceeded=said)
            rule = (
                f"= {said.max_tokens} and a prompt of {said.prompt_tokens} tokens exceed the model's context of "
                f"{said.limit_tokens} tokens; lower it to {said.limit_tokens - said.prompt_tokens} "
                "or shorten the prompt"
            )
            return replace(bad_value(param, rule, code), exceeded=said)
        case ErrorCode.NOT_READY | ErrorCode.DRAINING | ErrorCode.QUEUE_FULL:
            wait_seconds = error.retry_after_seconds or retry_after_seconds
            return ApiError(503, error.message, "server_error", code=error.code.value, retry_after_seconds=wait_seconds)
        case ErrorCode.KEY_MISSING:
            return answer_broken(KEY_NOT_TAKEN)
        case ErrorCode.NOT_FOUND | ErrorCode.METHOD_NOT_ALLOWED:
            return answer_broken("What answers at the engine's address is not an engine of this version.")
        case _:
            assert_never(error.code)
