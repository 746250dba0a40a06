"""How far one choice of a request has come, and the request that continues it from there.

What was relayed is kept as token ids and a count of characters: the next engine takes the ids as output that it has
generated, and its text goes on after those characters. Seed, limits and prompt stay the first ones, so it counts,
stops, penalizes and draws its noise as the first engine would have.
"""

from dataclasses import dataclass, field
from typing import assert_never

from stageline_api.engine_http import HIGHEST_PRIORITY, Admitted, Delta, Finished, GenerateRequest
from stageline_gateway.engine_client.generation import EngineEvent

MOST_ID_CHARACTERS = 128


@dataclass(slots=True)
class Progress:
    """One choice, over all the engines that worked on it."""

    request: GenerateRequest
    token_ids: list[int] = field(default_factory=list)
    """All that were relayed."""
    characters: int = 0
    """Of text that were relayed."""
    admissions: int = 0
    """Engines that admitted it."""
    revision: str = ""
    """Of the group that the tokens came from: others may answer differently."""
    runs: int = 0
    """Engines it was sent to."""
    losses: int = 0
    """Engines that had got it and were lost."""

    @property
    def is_admitted(self) -> bool:
        """Whether it was acknowledged, by whichever engine."""
        return self.admissions > 0

    @property
    def has_output(self) -> bool:
        """Whether anything was relayed, so that starting again would repeat it."""
        return bool(self.token_ids) or self.characters > 0

    def next_request(self) -> GenerateRequest:
        """What to ask the next engine, under an id of its own: the last engine may still hold the other."""
        self.runs += 1
        if self.runs == 1:
            return self.request
        suffix = f".{self.runs}"
        update = {
            "request_id": self.request.request_id[: MOST_ID_CHARACTERS - len(suffix)] + suffix,
            "priority": max(HIGHEST_PRIORITY, self.request.priority - 1),
        }
        if self.has_output:
            update |= {"generated_token_ids": tuple(self.token_ids), "generated_characters": self.characters}
        return self.request.model_copy(update=update)

    def take(self, event: EngineEvent, revision: str) -> bool:
        """Account for an event of a group of `revision`; returns whether the client is to see it."""
        match event:
            case Admitted():
                self.admissions += 1
                return self.admissions == 1
            case Delta(text=text, token_ids=token_ids):
                self.revision = revision
                self.token_ids.extend(token_ids)
                self.characters += len(text)
            case Finished():
                pass
            case _:
                assert_never(event)
        return True
