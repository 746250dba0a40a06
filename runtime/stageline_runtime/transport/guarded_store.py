"""torch's TCPStore, where nobody without the bus's token can put words into a peer's mouth.

TCPStore asks nobody who they are: whoever reaches its port may list its keys and set them, and what stages look for
there is each other's addresses. So each value carries a code over its key and itself, made with the token. A value that
somebody else has set ends the meeting with an error that says so; it never leads a stage to a stranger.
"""

import hashlib
import hmac
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import Store

_CODE_BYTES: Final = hashlib.sha256().digest_size


class GuardedStore(Store):
    """What process groups ask of a store, over `inner`. Errors reach torch as the `RuntimeError` that it expects."""

    def __init__(self, inner: Store, token: str) -> None:
        super().__init__()
        self._inner = inner
        self._token = token.encode()

    def set(self, key: str, value: "str | bytes") -> None:
        plain = value.encode() if isinstance(value, str) else bytes(value)
        inner: Any = self._inner  # torch's stubs know strings alone
        inner.set(key, self._code(key, plain) + plain)

    def get(self, key: str) -> bytes:
        """Waits until it is set; raises RuntimeError where its setter did not know the token."""
        found = self._inner.get(key)
        code, plain = found[:_CODE_BYTES], found[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(key, plain)):
            raise RuntimeError(f"what the rendezvous store holds for {key[-40:]!r} was set by a stranger")
        return plain

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._inner.wait(keys)
        else:
            self._inner.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def add(self, key: str, value: int) -> int:
        """A number that all add to: no peer is found by it, so it carries no code."""
        return int(self._inner.add(key, value))

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def _code(self, key: str, value: bytes) -> bytes:
        return hmac.new(self._token, b"stageline store\0" + key.encode() + b"\0" + value, hashlib.sha256).digest()
