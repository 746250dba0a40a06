"""One request as the scheduler sees it: token ids and counters; everything else is derived."""

from dataclasses import dataclass, field

from stageline_runtime.messages import RowSampling

MAX_DECODES_AHEAD = 2
"""One sample in flight and one that waits on the bus for its feedback; more would only run dead rows."""


@dataclass(slots=True, kw_only=True)
class Request:
    """State of one request from its queueing to its end."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: RowSampling
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    cohort: int = -1
    slot: int = -1
    generation: int = -1
    scheduled_prompt_tokens: int = 0
    """Prompt tokens already put into plans."""
    samples_issued: int = 0
    """Samples asked for in plans, whether or not their tokens are known yet."""
    last_sample_seq: int = -1
    """The plan that samples the newest token; the next decode runs only after its feedback."""
    output: list[int] = field(default_factory=list)
    fill_sent: bool = False
    changing_cohort: bool = False
    """Moved to another cohort, and not yet in one of its plans."""

    def __post_init__(self) -> None:
        assert self.prompt, f"request {self.request_id} has no prompt token"
        assert self.max_new_tokens >= 1, f"request {self.request_id} may generate {self.max_new_tokens} tokens"

    @property
    def reserved_tokens(self) -> int:
        """Cache positions the request may come to use (the last token is never an input)."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def samples_in_flight(self) -> int:
        """Samples issued whose tokens are not known yet."""
        return self.samples_issued - len(self.output)

    @property
    def prefill_pending(self) -> int:
        """Prompt tokens not yet in a plan."""
        return len(self.prompt) - self.scheduled_prompt_tokens

    @property
    def can_decode(self) -> bool:
        """Whether one more decode row may be put into a plan now.

        After a change of cohort only when the newest token is known: a row that had to wait for feedback of a plan just
        before its own would hold up every row of its new cohort.
        """
        return (
            self.prefill_pending == 0
            and 0 < self.samples_issued < self.max_new_tokens
            and self.samples_in_flight < (1 if self.changing_cohort else MAX_DECODES_AHEAD)
        )

    @property
    def decode_position(self) -> int:
        """Position of the next decode row's input token."""
        return len(self.prompt) + self.samples_issued - 1
