"""Reads a request's body, bounded in bytes: what is longer is not read."""

from fastapi import Request


async def read_body(http_request: Request, max_body_bytes: int) -> bytes | None:
    """The whole body, or None when it is larger than allowed (the rest isn't read).

    Raises:
        ClientDisconnect: starlette's; the client left while sending.
    """
    chunks: list[bytes] = []
    size_bytes = 0
    async for chunk in http_request.stream():
        chunks.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > max_body_bytes:
            return None
    return b"".join(chunks)
