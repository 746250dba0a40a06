"""A stage's timeline (`GET http://<pod>:9100/timeline?since_seq=N`) and the engine's list of its stages.

All `*_nanoseconds` are readings of the local host's monotonic clock; `StageClock.offset_nanoseconds` converts a stage's
reading into the engine's: engine reading = stage reading - offset.
"""

from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict

IDLE_STATE: Final = "idle"
BUSY_PREFIX: Final = "busy."
WAIT_PREFIX: Final = "wait."

FORWARD: Final = "forward"
DRAFT: Final = "draft"
PROMPT_LOGPROBS: Final = "prompt log probabilities"
RECEIVE_HIDDEN: Final = "receive hidden"
RECEIVE_FEEDBACK: Final = "receive feedback"
SEND_HIDDEN: Final = "send hidden"
SEND_FEEDBACK: Final = "send feedback"


class TimelineMark(NamedTuple):
    """From `at_nanoseconds` on the stage is in `state`, until the next mark."""

    state: str
    """`busy.<kind>`, `wait.<reason>` or `idle`, as in the state counters."""
    operation: str
    """The exact operation (`send hidden`); empty if the state is exact enough."""
    at_nanoseconds: int


class TimelineStep(BaseModel):
    """One plan on one stage, with the time since the previous plan: steps cover the stage's time without gaps."""

    model_config = ConfigDict(frozen=True)

    seq: int
    cohort: int
    kind: str
    """Kind of compute; empty for a heartbeat, which computes nothing."""
    rows: int
    tokens: int
    """Without padding."""
    feedback_through: int
    """All feedback up to this plan was applied before the first stage built its inputs."""
    marks: tuple[TimelineMark, ...]
    """In time order; the first is at the end of the previous plan."""
    end_nanoseconds: int
    drafts: int = 0
    """How many of `tokens` are drafts to verify."""

    @property
    def begin_nanoseconds(self) -> int:
        """When the previous plan was finished."""
        return self.marks[0].at_nanoseconds if self.marks else self.end_nanoseconds


class TimelinePage(BaseModel):
    """Some steps, oldest first. Ask again with the last `seq` while `more`."""

    model_config = ConfigDict(frozen=True)

    stage: int
    stage_count: int
    incarnation: int
    oldest_seq: int | None
    """Oldest step still kept; a reader that wanted an older one has missed steps. None before the first step."""
    more: bool
    steps: tuple[TimelineStep, ...]
    open_marks: tuple[TimelineMark, ...]
    """Marks since the stage's last step (not the last one of this page)."""
    now_nanoseconds: int


class StageClock(BaseModel):
    """A stage's clock against the engine's."""

    model_config = ConfigDict(frozen=True)

    stage: int
    offset_nanoseconds: int
    """Stage's clock minus engine's."""
    round_trip_nanoseconds: int
    """Round trip of the exchange that gave the offset; the offset is wrong by at most half of it, plus drift."""
    error_nanoseconds: int
    """Current bound on the offset's error: half the round trip plus the possible drift of two clocks since."""


class GroupClocks(BaseModel):
    """`GET http://<stage 0 pod>:8002/clock`: stages with a measured clock offset."""

    model_config = ConfigDict(frozen=True)

    stages: tuple[StageClock, ...]


class StageEndpoint(BaseModel):
    """The address of one stage."""

    model_config = ConfigDict(frozen=True)

    stage: int
    health_url: str
    """Base URL of its health endpoint, `http://<pod>:9100`."""
    host: str
    """Identity of its machine; stages with the same one share a clock."""


class GroupStages(BaseModel):
    """`GET http://<stage 0 pod>:8002/stages`: the connected stages, in order."""

    model_config = ConfigDict(frozen=True)

    served_name: str
    stage_count: int
    incarnation: int
    stages: tuple[StageEndpoint, ...]
