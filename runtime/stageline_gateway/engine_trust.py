"""Which engines this gateway takes for a model's own, where pods of a model talk by TLS (`spec.network.tls`).

An engine shows a certificate, which must be of an authority in the gateway's file and for the model's name; discovery
knows the name. Without a file no such engine is asked anything: never in clear, and never unverified.
"""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Final, NamedTuple

from stageline_api.errors import UserError

POLL_SECONDS: Final = 1.0
NO_AUTHORITY: Final = "its engine talks by TLS, and this gateway was given no --engine-authority"

logger = logging.getLogger(__name__)


class EngineAddress(NamedTuple):
    url: str
    tls_name: str = ""
    """Whose certificate it must show; empty: it speaks plain HTTP."""

    @property
    def host(self) -> str:
        """As the `Host` of a request names it."""
        return self.url.partition("://")[2].partition("/")[0]


class EngineTrust:
    """`context` is for connections to engines; read anew it trusts more authorities, and fewer after a restart."""

    def __init__(self, path: Path | None = None) -> None:
        """`path` is a PEM file of authorities; raises UserError when it can't be used."""
        self._path = path
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._seen = b""
        if path is not None:
            try:
                self._take(path.read_bytes())
            except (OSError, ValueError) as error:
                raise UserError(f"--engine-authority {path} can't be used: {_reason(error)}.") from None

    @property
    def is_given(self) -> bool:
        return self._path is not None

    async def watch(self) -> None:
        """Take up what is new in the file, until cancelled."""
        problem = ""
        while self._path is not None:
            await asyncio.sleep(POLL_SECONDS)
            try:
                found = self._path.read_bytes()
                if found != self._seen:
                    self._take(found)
                    logger.info("authorities of engines read again")
                problem = ""
            except (OSError, ValueError) as error:
                if (reason := _reason(error)) != problem:
                    logger.warning("--engine-authority can't be read again, those read before stay: %s", reason)
                problem = reason

    def _take(self, authorities: bytes) -> None:
        self.context.load_verify_locations(cadata=authorities.decode("ascii"))
        self._seen = authorities


def by_name(tls_name: str) -> dict[str, str]:
    """httpx's extensions of a request to an engine whose certificate must be for this name; empty: it speaks HTTP."""
    return {"sni_hostname": tls_name} if tls_name else {}


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) or not isinstance(error, OSError):
        return "it holds no certificate in PEM form"
    return error.strerror or str(error)
