"""TLS with the gateway's own certificate and key, read again when the files change.

If a new pair can't be used (half written, of different keys), the old one stays in force. The log reports it once, and
it is retried at the next check. Open connections keep their certificate.
"""

import asyncio
import logging
import ssl
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from stageline_api.errors import UserError
from stageline_gateway.telemetry.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.5

Fingerprint = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files; the certificate's may hold its chain."""

    certificate: Path
    key: Path

    def fingerprint(self) -> Fingerprint:
        found = [path.stat() for path in (self.certificate, self.key)]
        return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in found)

    def load_into(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self.certificate, self.key, password=_no_password)

    def expires_at(self) -> datetime | None:
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
        raise UserError(f"The TLS certificate and key can't be used: {_reason(error)}.") from None
    return context


async def watch(files: TlsFiles, context: ssl.SSLContext, metrics: GatewayMetrics) -> None:
    """Keep `context`, made from `files`, up to date with them until cancelled. Whatever fails, it stays usable."""
    metrics.certificate_read(files.expires_at())
    seen: Fingerprint | None = None
    problem = ""
    with suppress(OSError):  # gone since `context` was made: said below
        seen = files.fingerprint()
    while True:
        await asyncio.sleep(POLL_SECONDS)
        try:
            found = files.fingerprint()
            if found == seen and not problem:
                continue
            # A pair that does not fit would leave a context with half of it.
            files.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            files.load_into(context)
        except Exception as error:  # from outside, and the old pair serves on
            if (reason := _reason(error)) != problem:
                logger.warning("TLS files can't be read again, those read before stay in force: %s", reason)
            problem = reason
            metrics.certificate_stale()
            continue
        seen, problem = found, ""
        metrics.certificate_read(files.expires_at())
        logger.info("TLS certificate read again")


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else type(error).__name__


# The expiry is read from the certificate's DER encoding: the standard library reports that of peers' certificates only.
# RFC 5280, section 4.1: a certificate is a sequence. Its first element holds, in order, an optional version, the serial
# number, the signature's algorithm, the issuer and the validity: a pair of times.
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_LONG_LENGTH: Final = 0x80


class NoExpiryError(ValueError):
    """The text is not a certificate that can be read here."""


def expiry_of(pem: str) -> datetime:
    """`notAfter` of the first certificate in `pem`; raises NoExpiryError."""
    begin, end = pem.find(ssl.PEM_HEADER), pem.find(ssl.PEM_FOOTER)
    try:
        der = ssl.PEM_cert_to_DER_cert(pem[begin : end + len(ssl.PEM_FOOTER)])
        certificate, _ = _element(der, _SEQUENCE)
        rest, _ = _element(certificate, _SEQUENCE)
        if rest[0] == _VERSION:
            rest = _after(rest)
        for _field in ("serial number", "algorithm", "issuer"):
            rest = _after(rest)
        validity, _ = _element(rest, _SEQUENCE)
        return _time(_after(validity))
    except (ValueError, IndexError) as error:
        raise NoExpiryError(f"not a certificate: {error}") from error


def _element(data: bytes, tag: int | None = None) -> tuple[bytes, bytes]:
    if tag is not None and data[0] != tag:
        raise ValueError(f"tag {data[0]:#x} where {tag:#x} was expected")
    length, start = data[1], 2
    if length & _LONG_LENGTH:
        start += length & ~_LONG_LENGTH
        length = int.from_bytes(data[2:start])
    if start + length > len(data):
        raise ValueError("it is cut short")
    return data[start : start + length], data[start + length :]


def _after(data: bytes) -> bytes:
    return _element(data)[1]


def _time(data: bytes) -> datetime:
    """RFC 5280, 4.1.2.5: UTCTime has two digits for the years 1950 to 2049, GeneralizedTime four."""
    content, _ = _element(data)
    text = content.decode("ascii")
    match data[0]:
        case tag if tag == _UTC_TIME:
            text = ("19" if text[:2] >= "50" else "20") + text
        case tag if tag != _GENERALIZED_TIME:
            raise ValueError(f"tag {data[0]:#x} where a time was expected")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
