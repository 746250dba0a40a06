"""What a client of another API calls the fields of the chat that its body became. Pure.

Errors, and the names of ignored fields, carry paths of the chat and are rendered with the client's. A path of
the chat is looked up as a field, then by its beginning among the places of this very body (`messages[3]`, whose rest
follows), then as a field of the entries of a list that both have, with its index put back.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

_INDEX: Final = re.compile(r"\[\d+\]")
_CUT: Final = re.compile(r"(?=[.\[])|$")


@dataclass(frozen=True, slots=True)
class ClientNames:
    """Made without anything, it leaves all names as they are."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """Names of the chat's fields, without indexes -> the client's."""
    places: Callable[[], Mapping[str, str]] = dict
    """Makes beginnings of paths in this chat -> where the client wrote that; asked only once something is named."""

    def of(self, path: str) -> str:
        if (index := _INDEX.search(path)) is None or path in self.fields:
            return self.fields.get(path, path)
        places = self.places()
        for cut in sorted((found.start() for found in _CUT.finditer(path)), reverse=True):
            if (place := places.get(path[:cut])) is not None:
                return place + path[cut:]
        theirs, entries = self.fields.get(_INDEX.sub("", path), path), path[: index.start()]
        return entries + index[0] + theirs.removeprefix(entries) if theirs.startswith(f"{entries}.") else theirs
