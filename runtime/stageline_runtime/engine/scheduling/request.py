"""One request as the scheduler sees it: token ids and counters; everything else is derived.

Its inputs (prompt, and output known when it got its slot) are computed in chunks; then each row takes the token before
as its input. A request that loses its slot starts again from all tokens known by then, so it never repeats or loses
one.
"""

from bisect import insort
from dataclasses import dataclass, field

from stageline_runtime.plan_bus.messages import RequestSampling, SampledRow
from stageline_runtime.speculation.request_drafts import RequestDrafts

MAX_DECODES_AHEAD = 2
"""One sample in flight and one that waits on the bus for its feedback; more would only produce stale rows."""
NO_SLOT = -1


@dataclass(slots=True, kw_only=True)
class Request:
    """State of one request from its queueing to its end."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: RequestSampling
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    output: list[int] = field(default_factory=list)
    """Tokens generated so far; not empty from the start when another engine generated some before."""
    priority: int = 0
    """Lower runs first."""
    cache_salt: str = ""
    """It reuses cached prefixes only of requests with the same salt."""
    prefixes: tuple[tuple[str, int], ...] = ()
    """Names of the prompt's prefixes, and how many tokens each has."""
    arrival: int = 0
    """Its place in the order of arrival; kept when it has to queue again."""
    cohort: int = -1
    slot: int = NO_SLOT
    generation: int = -1
    inputs: tuple[int, ...] = ()
    """Prompt, and the output known when it got its slot: the tokens to compute before it decodes."""
    scheduled_inputs: int = 0
    """How many of these are already in plans, or were found in the cache."""
    samples_issued: int = 0
    """Output tokens known when it got its slot, and samples requested since, known or not."""
    last_sample_seq: int = -1
    """The plan that samples the newest token; the next decode runs only after its feedback."""
    fill_sent: bool = False
    started: bool = False
    """A row of it has been planned, in this slot or one before."""
    out_of_turn: bool = False
    """It changed over to another cohort, or its last chunk ran in another's plan, and it has not decoded since."""
    drafts: RequestDrafts | None = None
    """None: this request doesn't speculate."""
    awaits_drafts: bool = False
    """The last stage drafts after the newest row; its drafts decide the next one."""
    verifying: tuple[int, ...] | None = None
    """The drafts of the verifying row in flight; the request has no other row in flight then."""
    prompt_told: int = 1
    """If log probabilities of the prompt are requested: for how many of its tokens they are known, in this group or
    an earlier one. The first token has none."""

    def __post_init__(self) -> None:
        assert self.prompt, f"request {self.request_id} has no prompt token"
        assert self.max_new_tokens > len(self.output), f"request {self.request_id} has all its {self.max_new_tokens}"
        self.restart()

    def restart(self) -> None:
        """Discard computed state: without a slot, start from the tokens known now."""
        self.slot = NO_SLOT
        self.inputs = (*self.prompt, *self.output)
        self.scheduled_inputs = 0
        self.samples_issued = len(self.output)
        self.fill_sent = False
        self.out_of_turn = False
        self.awaits_drafts = False
        self.verifying = None

    @property
    def awaits_reports(self) -> bool:
        """Whether log probabilities of prompt tokens are requested and not known yet."""
        return self.sampling.num_top_prompt_logprobs is not None and self.prompt_told < len(self.prompt)

    @property
    def reusable_inputs(self) -> tuple[int, ...]:
        """The inputs with keys and values that may come from the cache, and one more.

        A token's log probability requires that its predecessor is computed.
        """
        return self.inputs[: self.prompt_told] if self.awaits_reports else self.inputs

    def report_of(self, start: int, stop: int) -> tuple[int, tuple[int, ...]]:
        """What a chunk of inputs `start` up to `stop` reports: from which of its tokens on, and what follows these."""
        if not self.awaits_reports:
            return 0, ()
        first = max(start, self.prompt_told - 1)
        return first - start, self.prompt[first + 1 : stop + 1] if first < stop else ()

    @property
    def seniority(self) -> tuple[int, int]:
        """Sort key: smaller runs first, by priority, then by arrival."""
        return self.priority, self.arrival

    @property
    def most_inputs(self) -> int:
        """Maximum number of cache positions of the request (the last token is never an input)."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def samples_in_flight(self) -> int:
        return self.samples_issued - len(self.output)

    @property
    def prefill_pending(self) -> int:
        return len(self.inputs) - self.scheduled_inputs

    @property
    def can_decode(self) -> bool:
        """Whether one more decode row may be put into a plan now.

        Out of turn only when the newest token is known: a row that had to wait for feedback of a plan just before its
        own would hold up every row of its cohort.
        """
        return (
            self.can_speculate
            and self.samples_issued < self.max_new_tokens
            and self.samples_in_flight < (1 if self.out_of_turn else MAX_DECODES_AHEAD)
        )

    @property
    def decode_position(self) -> int:
        return len(self.prompt) + self.samples_issued - 1

    @property
    def known_computed_tokens(self) -> int:
        """Positions that existing plans write and that have known tokens."""
        written = self.scheduled_inputs if self.prefill_pending else self.decode_position
        return min(written, len(self.prompt) + len(self.output))

    @property
    def known_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def propose(self, num_rows: int, most: int) -> tuple[int, ...]:
        """Drafts for a verifying row of a plan with `num_rows` rows: at most `most`, and never past its last token."""
        if self.drafts is None or not self.can_speculate:
            return ()
        room = min(most, self.max_new_tokens - len(self.output) - 1)
        return self.drafts.propose(self.known_tokens, self.tokens, num_rows)[: max(0, room)]

    @property
    def can_speculate(self) -> bool:
        return self.prefill_pending == 0 and self.verifying is None and not self.awaits_drafts

    def steps_to_draft(self, num_rows: int, delayed_stages: int) -> int:
        """How many tokens the last stage is to draft after the row that is planned now, one of `num_rows`.

        A verifying row of all of them still leaves one token to come.
        """
        if self.drafts is None:
            return 0
        most = self.max_new_tokens - self.samples_issued - 2
        known = len(self.prompt) + self.samples_issued + 1
        return self.drafts.steps_to_draft(known, num_rows, most, delayed_stages)

    def take_drafts(self, position: int, token_ids: tuple[int, ...]) -> None:
        """What the last stage drafted is here."""
        self.awaits_drafts = False
        if self.drafts is not None and token_ids:
            self.drafts.take_drafted(position, token_ids)

    def take(self, row: SampledRow) -> tuple[int, ...]:
        """Account for a sampled row; returns its tokens.

        Drafts after a stop token are dropped: they are not part of the request's output.
        """
        if self.verifying is None:
            self.output.append(row.token)
            if self.drafts is not None:
                self.drafts.note_plain_token(self.known_tokens, self.tokens)
            return (row.token,)
        verified, self.verifying = self.verifying, None
        held = verified[: row.num_sampled - 1]
        tokens = self._up_to_the_end((*held, row.token))
        self.output += tokens
        self.samples_issued = len(self.output)
        if self.drafts is not None:
            self.drafts.note_row(len(verified), min(len(held), len(tokens)))
        return tokens

    def _up_to_the_end(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        ends = (index for index, token in enumerate(tokens, start=1) if token in self.stop_token_ids)
        return tokens[: next(ends, len(tokens))]

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Known tokens of prompt and output from position `start` up to `stop`."""
        border = len(self.prompt)
        if stop <= border:
            return self.prompt[start:stop]
        return (*self.prompt[start:], *self.output[max(0, start - border) : stop - border])


class WaitingQueue:
    """Requests without a slot, in the order in which they get one: by priority, then by arrival.

    The first request is never skipped for one that would fit sooner, so short prompts don't starve a long one. A
    request that lost its slot returns to its old place, before all later arrivals of its priority.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def first(self) -> Request | None:
        return self._requests[0] if self._requests else None

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=lambda each: each.seniority)

    def take_first(self) -> Request:
        return self._requests.pop(0)

    def remove(self, request_id: str) -> bool:
        for index, request in enumerate(self._requests):
            if request.request_id == request_id:
                del self._requests[index]
                return True
        return False
