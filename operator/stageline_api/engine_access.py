"""Access to an engine: callers that send one of its API keys, and no web pages.

A namespace has one Secret of keys, one key per line. Its engines accept every key and its gateway sends the first. To
rotate a key without downtime, add a second line, restart the groups, swap the lines, then delete the old line. The
engine's state is readable without a key, on a port of its own. An engine without keys only accepts connections on a
loopback address.
"""

import hmac
import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Final

KEYS_SECRET: Final = "stageline-engine-keys"
KEYS_ENTRY: Final = "keys"
SHORTEST_KEY: Final = 16
"""Characters. Keys that the operator generates have 64."""
_CONTENT_TYPES: Final = frozenset({"application/json", "application/x-ndjson"})
"""HTML forms can't send these types: a page can only send them to another origin after a preflight request."""
_KEY: Final = re.compile(r"[!-~]+")


def read_keys(text: str) -> tuple[str, ...]:
    """The keys of a Secret, in order; blank lines are ignored.

    Raises:
        ValueError: a key is too short or has a character that no header may have; the message does not show it.
    """
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    for place, key in enumerate(keys, 1):
        if len(key) < SHORTEST_KEY or not _KEY.fullmatch(key):
            raise ValueError(f"key {place} must be {SHORTEST_KEY} or more printable ASCII characters without a space")
    return keys


def authorization(keys: Sequence[str]) -> str:
    """The `Authorization` header of a caller with these keys; empty without keys."""
    return f"Bearer {keys[0]}" if keys else ""


def is_admitted(keys: Sequence[str], headers: Mapping[str, str]) -> bool:
    """Whether a request has one of the keys; without keys every request is admitted."""
    shown = headers.get("authorization", "").encode()
    return not keys or any(hmac.compare_digest(f"Bearer {key}".encode(), shown) for key in keys)


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can reach the address."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_of_this_machine(host: str) -> bool:
    """Whether a `Host` header is an address or this machine's name: not a DNS name that a web page's owner controls."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def why_unwelcome(headers: Mapping[str, str], any_name: bool = False) -> str | None:
    """Why a request on a port without keys must come from a web page, as a sentence; None if it need not.

    Ports for machines reject browsers: the browser's user does not know of the request. Browsers identify themselves by
    headers, and a page that uses DNS rebinding sends its own name as `Host`. `any_name`: this port has DNS names.
    """
    if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        return "This port does not serve web pages."
    if not any_name and not is_of_this_machine(headers.get("host", "localhost")):
        return "Use this port's address, not a name."
    if headers.get("content-type", "application/json").partition(";")[0].strip().lower() not in _CONTENT_TYPES:
        return "The content type must be application/json."
    return None
