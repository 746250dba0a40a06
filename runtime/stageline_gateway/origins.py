"""Origins of web pages, as browsers send them: scheme, host and port, without a path."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

ANY_ORIGIN: Final = "*"
_ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s,*]+")
_PARTS: Final = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~-]+)(?::(?P<port>[0-9]{1,9}))?"
)
_DEFAULT_PORTS: Final[Mapping[str, int]] = MappingProxyType({"http": 80, "https": 443})
_MAX_PORT: Final = 65535


def is_origin(text: str) -> bool:
    """Whether `text` is an origin, or `*` for any."""
    return _ORIGIN.fullmatch(text) is not None


def check_listed_origin(text: str) -> None:
    """Raise ValueError with a sentence unless `text` is `*` or an origin exactly as browsers send it."""
    if text in (ANY_ORIGIN, "null"):
        return
    parts = _PARTS.fullmatch(text)
    if parts is None or int(parts["port"] or 0) > _MAX_PORT:
        raise ValueError(
            f"{text!r} must be * or scheme://host[:port], without a path, in lower case; "
            "a name beyond ASCII is written as xn--…"
        )
    if (sent := _as_sent(parts)) != text:
        raise ValueError(f"{text!r} matches no request, as browsers send {sent!r}: write {sent!r}")


def _as_sent(parts: re.Match[str]) -> str:
    """Browsers send no default port, and hosts of HTTP in lower case."""
    scheme = parts["scheme"].lower()
    host = parts["host"].lower() if scheme in _DEFAULT_PORTS else parts["host"]
    is_default = parts["port"] is None or int(parts["port"]) == _DEFAULT_PORTS.get(scheme)
    return f"{scheme}://{host}" + ("" if is_default else f":{int(parts['port'])}")
