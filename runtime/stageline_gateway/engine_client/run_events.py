"""Events of a request's run on an engine, and how the run may fail.

A run is one generation on one engine. It emits exactly one Admitted, any number of PromptTokens and of Delta, and one
Finished; or one of three errors, each of which states its cause.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from stageline_api.engine_http import Admitted, Delta, EngineError, Finished, PromptTokens
from stageline_gateway.engine_client.incoming_lines import Pause

EngineEvent = Admitted | PromptTokens | Delta | Finished


@dataclass(frozen=True, slots=True)
class Resumed:
    """The engine was lost after it had admitted the request, and from here on another run continues the answer."""


StreamEvent = EngineEvent | Resumed
"""What the rest of the gateway sees of one choice: one Admitted, any number of PromptTokens, of Delta and of Resumed,
one Finished, however many engines took part."""


TakeEvents = Callable[[Sequence[EngineEvent]], Pause | None]
"""Takes the next events of one run, at once and never none."""


class LossKind(StrEnum):
    """How an engine failed a request; a metric label."""

    UNREACHABLE = "unreachable"
    CONNECTION_LOST = "connection_lost"
    STALLED = "stalled"
    PROTOCOL = "protocol"
    ENGINE_FAILED = "engine_failed"
    HUNG = "hung"
    """Its group stopped making progress while it computed the request, which may be why."""
    ABORTED = "aborted"
    GONE = "gone"
    """Discovery or the probe say that the engine is no more, and it is silent."""
    LEFT = "left"
    """It drains, and another group takes the request over: no failure."""


@dataclass(eq=False)
class EngineLostError(Exception):
    """The engine did not finish the request. `message` is one sentence for the client."""

    kind: LossKind
    message: str
    is_echo: bool = False
    """Another request was lost by the very same event: a connection that both had."""
    had_no_part: bool = False
    """The request can't be why: it waited for its turn when its group ended, or was refused unread."""


@dataclass(eq=False)
class EngineRefusedError(Exception):
    """The engine answered that it will not admit the request."""

    error: EngineError


@dataclass(eq=False)
class AnswerFailedError(Exception):
    """The engine is well, and no engine can finish the answer. `message` is one sentence for the client."""

    message: str
