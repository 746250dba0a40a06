"""JSON responses that can't fail to be encoded."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from stageline_gateway.errors import ApiError
from stageline_gateway.sse import encode_json


class JsonAnswer(Response):
    """JSON in ASCII, so that any string a client sent can be repeated."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode `content`."""
        return encode_json(content)


def error_answer(error: ApiError, headers: Mapping[str, str] | None = None) -> JsonAnswer:
    """`error` as a response in OpenAI's form."""
    return JsonAnswer(error.body(), status_code=error.status, headers={**(headers or {}), **error.headers()})
