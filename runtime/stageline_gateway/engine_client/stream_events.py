"""What the rest of the gateway sees of one choice: the engine's events, and that it went on elsewhere.

One Admitted, any number of Delta and Resumed, one Finished, however many engines took part.
"""

from dataclasses import dataclass

from stageline_gateway.engine_client.generation import EngineEvent


@dataclass(frozen=True, slots=True)
class Resumed:
    """The engine was lost after the request had been admitted, and from here on another run continues it."""


StreamEvent = EngineEvent | Resumed
