"""`POST /v1/multiplexed`: many generations of one client over one connection, while both of its bodies are open.

The client's body is chunked and has a `ClientLine` on each line: it opens streams, and may hold, go on with and close
each of them. The engine's body is chunked, too, and has a line for each event of any stream: the stream's number, a
blank, and what `POST /v1/generate` would have written on a line of its own (`engine_http.Event`), or `Refused` in place
of a refusal's status. What several streams have to say at once goes out in one write. A line of a number alone is that
stream's blank line, which says that it still waits for its turn; a line of nothing says nothing.

Numbers are the client's own, are counted upwards, and never come twice on a connection. A stream is over with its
`Finished`, `Failed` or `Refused`, or when the client closes it, which aborts it. The connection's end aborts all of
them, and so does a line of the client's that can't be read, is too long or opens a number again: the engine ends its
body then. A request that is wrong within its line is `Refused`, and no other stream's matter. While a stream is held
the engine keeps what it has to say, merged, and writes none of it: so one slow reader stops nobody else's tokens. When
the client has ended its body, or the engine shuts down, the engine's body ends as soon as no stream is left.

Why lines over HTTP and not WebSocket or HTTP/2: both ends have an HTTP/1.1 parser in C already, with its bounds, its
key and its TLS; see docs/adr/0043. For engines whose status says `multiplexes`, and for requests of `MOST_LINE_BYTES`
at most: what is larger, or is told with megabytes of log probabilities, has a connection to itself and delays nobody.
"""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from stageline_api.engine_http import EngineError, GenerateRequest

MULTIPLEXED_PATH: Final = "/v1/multiplexed"
MOST_LINE_BYTES: Final = 64 * 1024
"""Of the client's: a line of so many is parsed in a millisecond."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


StreamNumber = Annotated[int, Field(ge=0, lt=2**53)]


class Open(_Frozen):
    """Generate this, as stream `stream`."""

    type: Literal["open"] = "open"
    stream: StreamNumber
    request: GenerateRequest


class Close(_Frozen):
    """Nothing more is wanted of it. May cross its end, and is nothing then."""

    type: Literal["close"] = "close"
    stream: StreamNumber


class Hold(_Frozen):
    """Keep what comes for it until `GoOn`."""

    type: Literal["hold"] = "hold"
    stream: StreamNumber


class GoOn(_Frozen):
    """Write of it again."""

    type: Literal["go_on"] = "go_on"
    stream: StreamNumber


ClientLine = Annotated[Open | Close | Hold | GoOn, Field(discriminator="type")]


class Refused(_Frozen):
    """The stream's only line: the engine did not admit the request."""

    type: Literal["refused"] = "refused"
    error: EngineError
