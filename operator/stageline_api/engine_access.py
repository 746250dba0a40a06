"""Who may ask an engine: callers that show one of its keys, and no web page.

A namespace has one Secret of keys, a key a line. Its engines take every line and its gateway shows the first, so a key
is changed while all serves: a second line, the groups made anew, the lines the other way round, the old line taken
away. What an engine says of itself is read without a key, on a port that does nothing else. An engine that has no key
answers on this machine's own addresses alone.
"""

import hmac
import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Final

KEYS_SECRET: Final = "stageline-engine-keys"
KEYS_ENTRY: Final = "keys"
SHORTEST_KEY: Final = 16
"""Characters. One that the operator draws has 64."""
_CONTENT_TYPES: Final = frozenset({"application/json", "application/x-ndjson"})
"""None of them is a form's: a page may send these to another origin only after asking it."""
_KEY: Final = re.compile(r"[!-~]+")


def read_keys(text: str) -> tuple[str, ...]:
    """The keys of a Secret, in order; lines that are blank count for nothing.

    Raises:
        ValueError: a key is too short or has a character that no header may have; the message does not show it.
    """
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    for place, key in enumerate(keys, 1):
        if len(key) < SHORTEST_KEY or not _KEY.fullmatch(key):
            raise ValueError(f"key {place} must be {SHORTEST_KEY} or more printable ASCII characters without a space")
    return keys


def authorization(keys: Sequence[str]) -> str:
    """What a caller that knows these keys sends as `Authorization`; empty when it knows none."""
    return f"Bearer {keys[0]}" if keys else ""


def is_admitted(keys: Sequence[str], headers: Mapping[str, str]) -> bool:
    """Whether a request shows one of the keys; where there are none, everybody is admitted."""
    shown = headers.get("authorization", "").encode()
    return not keys or any(hmac.compare_digest(f"Bearer {key}".encode(), shown) for key in keys)


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can reach the address."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_of_this_machine(host: str) -> bool:
    """Whether a `Host` header names an address, or this machine: no name that a web page's owner could point here."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def why_unwelcome(headers: Mapping[str, str], any_name: bool = False) -> str | None:
    """Why a request on a port that asks for no key must come from a web page, as a sentence; None when it needn't.

    Ports for machines alone take nothing from a browser, whose user knows nothing of it. Browsers say so themselves,
    and a page whose name was pointed here gives that name. `any_name`: this port has names of its own.
    """
    if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        return "Nothing is answered to web pages on this port."
    if not any_name and not is_of_this_machine(headers.get("host", "localhost")):
        return "This port is asked by its address, not by a name."
    if headers.get("content-type", "application/json").partition(";")[0].strip().lower() not in _CONTENT_TYPES:
        return "The content type must be application/json."
    return None
