"""When a certificate expires, read from its DER encoding: the standard library tells that of peers' certificates only.

RFC 5280, section 4.1: a certificate is a sequence whose first element holds, in order, an optional version, the serial
number, the signature's algorithm, the issuer and the validity: a pair of times.
"""

import ssl
from datetime import UTC, datetime
from typing import Final

_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_LONG_LENGTH: Final = 0x80


class NoExpiryError(ValueError):
    """The text is not a certificate that this can read."""


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
    """The first element's content, and what follows it."""
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
