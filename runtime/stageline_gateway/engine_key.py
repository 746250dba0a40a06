"""What this gateway shows to engines so that they answer it: the first of their namespace's keys.

On one machine it is in the environment. In a cluster discovery reads it from its Secret and looks again now and then,
so a key may change while the gateway runs. Until it is known, requests go out without one.
"""

from dataclasses import dataclass
from typing import Final

from stageline_api.engine_access import authorization, read_keys

KEY_NOT_TAKEN: Final = "The engine does not take this gateway's key."
"""For the client: an engine answered that it was shown none of its keys."""


@dataclass(slots=True)
class EngineKey:
    """The newest key that is known."""

    authorization: str = ""
    """Value of the `Authorization` header; empty: none is shown."""

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": self.authorization} if self.authorization else {}

    def take(self, text: str) -> None:
        """Show the first of these keys, a key a line, from now on; raises ValueError for one that can't be used."""
        self.authorization = authorization(read_keys(text))
