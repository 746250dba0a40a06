"""TLS with a certificate and key of one's own, read again when the files change.

A new pair that can't be used (half written, of different keys) keeps the old one in force, is said once in the log and
tried again at the next look. Connections that are open keep what they began with.
"""

import asyncio
import logging
import ssl
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

from stageline_api.errors import UserError
from stageline_gateway.server.certificate_expiry import NoExpiryError, expiry_of

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.5

Fingerprint = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files; the certificate's may hold its chain."""

    certificate: Path
    key: Path

    def fingerprint(self) -> Fingerprint:
        """Changes when one of the files does; raises OSError."""
        found = [path.stat() for path in (self.certificate, self.key)]
        return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in found)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Use the pair for connections to come; raises OSError, ssl.SSLError among them."""
        context.load_cert_chain(self.certificate, self.key, password=_no_password)

    def expires_at(self) -> datetime | None:
        """When the certificate expires; None when that can't be read from it."""
        try:
            return expiry_of(self.certificate.read_text(encoding="ascii", errors="replace"))
        except (OSError, NoExpiryError):
            return None


def _no_password() -> str:
    """OpenSSL would ask on the terminal for the passphrase of an encrypted key."""
    raise OSError("the key is encrypted, and there is nobody to ask for its passphrase")


def new_context(files: TlsFiles) -> ssl.SSLContext:
    """A server's context with the pair of `files`; raises UserError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        files.load_into(context)
    except OSError as error:
        raise UserError(f"The TLS certificate and key can't be used: {_told(error)}.") from None
    return context


class Told(Protocol):
    """Who wants to know of certificates."""

    def certificate_read(self, expires_at: datetime | None) -> None:
        """A pair is in force; None when it doesn't say until when."""

    def certificate_stale(self) -> None:
        """A newer pair can't be used."""


async def watch(files: TlsFiles, context: ssl.SSLContext, told: Told, poll_seconds: float = POLL_SECONDS) -> None:
    """Keep `context`, made from `files`, up to date with them until cancelled. Whatever goes wrong, it stays usable."""
    told.certificate_read(files.expires_at())
    seen: Fingerprint | None = None
    problem = ""
    with suppress(OSError):  # gone since `context` was made: said below
        seen = files.fingerprint()
    while True:
        await asyncio.sleep(poll_seconds)
        try:
            found = files.fingerprint()
            if found == seen and not problem:
                continue
            # A pair that does not fit would leave a context with half of it.
            files.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            files.load_into(context)
        except Exception as error:  # from outside, and the old pair serves on
            if (reason := _told(error)) != problem:
                logger.warning("TLS files can't be read again, those read before stay in force: %s", reason)
            problem = reason
            told.certificate_stale()
            continue
        seen, problem = found, ""
        told.certificate_read(files.expires_at())
        logger.info("TLS certificate read again")


def _told(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else type(error).__name__
