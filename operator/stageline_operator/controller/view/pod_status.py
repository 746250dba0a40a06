"""Asking a stage pod for `GET /status`, which its stage and its engine answer each on a port of their own.

Anybody who may make pods can label one and answer anything, so whoever asks makes sure that a PipelineModel owns the
pod, gives the answer a time, and takes only so many bytes.
"""

from collections.abc import Mapping
from typing import Any, Final

import httpx

from stageline_operator.controller.client.resources import controller_of, model_key_of
from stageline_operator.controller.view.object_cache import ObjectCache

_MOST_BYTES: Final = 64 * 1024
"""Many times what a stage or an engine says of itself."""


def is_owned(cache: ObjectCache, pod: Mapping[str, Any]) -> bool:
    """Whether the model that a pod's label names has made it."""
    key, owner = model_key_of(pod), controller_of(pod)
    model = None if key is None else cache.model(key)
    return model is not None and owner is not None and owner.get("uid") == model["metadata"]["uid"]


async def status_of(client: httpx.AsyncClient, pod: Mapping[str, Any], port: int) -> bytes:
    """The body as it was sent, up to a limit: a compressed one could grow to any size. Raises `httpx.HTTPError`."""
    address = pod["status"]["podIP"]
    host = f"[{address}]" if ":" in address else address
    url, body = f"http://{host}:{port}/status", bytearray()
    async with client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as answer:
        async for piece in answer.aiter_raw():
            body += piece
            if len(body) > _MOST_BYTES:
                raise httpx.DecodingError(f"{url} answers more than {_MOST_BYTES} bytes")
    return bytes(body)
