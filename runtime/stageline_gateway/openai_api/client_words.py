"""What a client of another API calls the fields of the chat that its body became. Pure.

A refusal, and a field that changed nothing, is told of in the client's own words: its field, at its index. A path of
the chat is looked up as a field, then by its beginning among the places of this very body (`messages[3]`, whose rest
follows), then as a field of the entries of a list that both have, with its index put back.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from stageline_gateway.errors import ApiError

_INDEX: Final = re.compile(r"\[\d+\]")
_CUT: Final = re.compile(r"(?=[.\[])|$")


@dataclass(frozen=True, slots=True)
class ClientWords:
    """Made without anything, it leaves all names as they are."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """Names of the chat's fields, without indexes -> the client's."""
    places: Callable[[], Mapping[str, str]] = dict
    """Makes beginnings of paths in this chat -> where the client wrote that; asked only once something is named."""
    phrases: Mapping[str, str] = field(default_factory=dict)
    """What refusals say of the chat's fields -> the same of the client's, where another name does not make it so."""

    def of(self, path: str) -> str:
        if (index := _INDEX.search(path)) is None or path in self.fields:
            return self.fields.get(path, path)
        places = self.places()
        for cut in sorted((found.start() for found in _CUT.finditer(path)), reverse=True):
            if (place := places.get(path[:cut])) is not None:
                return place + path[cut:]
        theirs, entries = self.fields.get(_INDEX.sub("", path), path), path[: index.start()]
        return entries + index[0] + theirs.removeprefix(entries) if theirs.startswith(f"{entries}.") else theirs

    def told(self, error: ApiError) -> ApiError:
        """`error` with the client's own name for the field that it names, and the client's words."""
        message = error.message
        for phrase, other in self.phrases.items():
            message = message.replace(phrase, other)
        if error.param is not None and (theirs := self.of(error.param)) != error.param:
            return replace(error, param=theirs, message=message.replace(error.param, theirs))
        return error if message == error.message else replace(error, message=message)
