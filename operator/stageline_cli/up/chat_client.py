"""A minimal OpenAI client for `--once`: streams one chat completion to the given writer."""

import json
from collections.abc import Callable
from typing import Any

import httpx

from stageline_api.errors import UserError


async def answer_prompt(
    url: str, model: str, prompt: str, max_tokens: int | None, write: Callable[[str], None]
) -> None:
    """Stream one chat answer at temperature 0 to `write`; raises `UserError` with the gateway's error message."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "stream": True,
    }
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    # trust_env: a proxy must not handle requests to this machine's own gateway.
    async with httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(30.0, read=None)) as client:
        try:
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    raise UserError(error_message(await response.aread(), response.status_code))
                async for line in response.aiter_lines():
                    write(_text_of(line))
        except httpx.HTTPError as error:
            raise UserError(f"the answer was cut off: {error or type(error).__name__}") from error


def _text_of(line: str) -> str:
    """Text of one server-sent event; empty for other lines."""
    payload = line.removeprefix("data:").strip()
    if not line.startswith("data:") or payload == "[DONE]":
        return ""
    event = json.loads(payload)
    if "error" in event:
        raise UserError(f"the answer was cut off: {event['error'].get('message', event['error'])}")
    choices = event.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


def error_message(body: bytes, status: int) -> str:
    """The message in an OpenAI error body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered with HTTP {status}"
