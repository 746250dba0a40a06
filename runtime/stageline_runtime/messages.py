"""What the engine and the stages say to each other on the plan bus: one frozen struct per thing said.

The handshake: a stage says `Hello`, the engine answers all of them at once with `Welcome` (the cut and the sizes), a
stage that has loaded, joined the rendezvous and warmed up says `Loaded`. After that the engine sends `StepPlan`s in
`seq` order to every stage and the last stage answers each with `StepDone`. Encoded with msgpack; never pickled.
"""

import enum

import msgspec

PROTOCOL_VERSION = 2


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Hello(_Message, frozen=True):
    """Stage to engine, first message. `token` is the bus's shared secret."""

    protocol: int
    stage: int
    stage_count: int
    incarnation: int
    token: str
    host: str
    """Identity of the machine, so that stages sharing one share its memory in the engine's arithmetic."""
    available_bytes: int
    health_url: str
    """Base URL of the stage's health endpoint, for those who ask the engine where its stages are."""


class Loaded(_Message, frozen=True):
    """Stage to engine: weights and KV cache are in place, peers are connected, a warm-up step has crossed."""

    stage: int
    memory_bytes: int


class TokenLogprobs(_Message, frozen=True):
    """Natural log probabilities under the raw logits: of the sampled token, and (token id, value) best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class SampledRow(_Message, frozen=True):
    """One sampled token of one request."""

    slot: int
    generation: int
    token: int
    logprobs: TokenLogprobs | None = None
    """There when the request asked for them."""
    failure: str | None = None
    """Why the request can't go on; its token then means nothing."""


class StepDone(_Message, frozen=True):
    """Last stage to engine: plan `seq` is finished; `rows` holds a token for each row that needed one."""

    seq: int
    rows: tuple[SampledRow, ...]


class DrainRequested(_Message, frozen=True):
    """Stage to engine: this pod was told to end; let the group finish its streams and shut down."""

    stage: int


class PlanMoments(_Message, frozen=True):
    """When one plan crossed a stage's links, in nanoseconds of the stage's clock; None where it did not."""

    seq: int
    feedback_through: int
    receive_began: int | None
    """The stage was ready for the hidden tensor and began to wait."""
    received: int | None
    send_began: int | None
    feedback_send_began: int | None
    """Last stage: the plan's own sampled rows."""
    feedback_received: int | None
    """First stage: all feedback up to `feedback_through` was there."""


class Pong(_Message, frozen=True):
    """Stage to engine: answer to a `Ping`, with the stage's clock and what it knows of its newest plans."""

    ping_nanoseconds: int
    """The engine's clock as the `Ping` had it."""
    received_nanoseconds: int
    """The stage's clock when it took the `Ping` off the bus."""
    sent_nanoseconds: int
    """The stage's clock when it answered."""
    moments: tuple[PlanMoments, ...]


class Welcome(_Message, frozen=True):
    """Engine to stage: what to load and how large to make things."""

    first_layer: int
    last_layer: int
    model_dir: str
    dtype: str
    num_cohorts: int
    slots_per_cohort: int
    slot_tokens: int
    """Capacity of one slot in tokens (`max_model_len`)."""
    max_step_tokens: int
    """Most tokens a plan carries."""
    stages_on_host: int
    """Stages of this group that share the machine, and so its cores."""


class Refused(_Message, frozen=True):
    """Engine to stage: the handshake failed; the stage exits 64 with this sentence."""

    detail: str


class RowSampling(_Message, frozen=True):
    """Sampling parameters of one request, sent once when its slot is filled."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    choice: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, addend), each id once."""
    num_top_logprobs: int | None = None
    """How many tokens to list with each sampled one; None asks for no log probabilities."""
    json_schema: str | None = None
    """The output must be JSON that satisfies this schema; checked by the engine."""
    num_prompt_tokens: int = 0
    """The border between prompt and output: input tokens at this position and after count as generated."""


class SlotFill(_Message, frozen=True):
    """A request takes a slot under a new generation; stages reset the slot's state."""

    slot: int
    generation: int
    sampling: RowSampling


class PlanRow(_Message, frozen=True):
    """One request's part of a step.

    `token_ids` holds the input of a prefill chunk; empty means a decode row, whose single input token stage 0 takes
    from feedback. `position` is the position of the first input token.
    """

    slot: int
    generation: int
    position: int
    num_tokens: int
    token_ids: tuple[int, ...]
    need_sample: bool


class GraphMode(enum.StrEnum):
    """How a plan's layers run. `FULL`: whole layers captured; `PIECEWISE`: all but attention; `OFF`: nothing."""

    OFF = "off"
    PIECEWISE = "piecewise"
    FULL = "full"


class StepPlan(_Message, frozen=True):
    """One step of one cohort. Everything a stage sends or receives for it follows from this alone.

    `feedback_through`: before stage 0 builds its inputs it applies the feedback of every plan up to this `seq`.
    `feedback_posted`: the last stage sends stage 0 the sampled rows of this plan.
    """

    seq: int
    cohort: int
    fills: tuple[SlotFill, ...]
    rows: tuple[PlanRow, ...]
    padded_tokens: int
    feedback_through: int
    feedback_posted: bool
    dummy: bool
    """A warm-up step: `padded_tokens` rows of nothing run through all layers and touch no slot."""
    graph_mode: GraphMode = GraphMode.OFF
    """Decided by the engine alone (`graphs.mode`), so that all stages run a plan alike."""

    @property
    def num_tokens(self) -> int:
        """Real tokens in the step."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def is_heartbeat(self) -> bool:
        """A rowless plan that no stage computes: it only shows that every stage still answers."""
        return not self.rows and not self.dummy

    @property
    def sampled_rows(self) -> tuple[PlanRow, ...]:
        """The rows that the last stage samples, in plan order; also the order of the feedback tensor."""
        return tuple(row for row in self.rows if row.need_sample)


class WorkOutstanding(_Message, frozen=True):
    """Engine to stage: whether any request is unfinished; separates starved from idle in the stage's clock."""

    outstanding: bool


class Shutdown(_Message, frozen=True):
    """Engine to stage: drained; exit 0."""

    reason: str


class Ping(_Message, frozen=True):
    """Engine to stage: tell me your clock. Answered between two plans."""

    engine_nanoseconds: int


class GroupFailed(_Message, frozen=True):
    """Engine to stage: the group can't go on, and the engine ends; the stage ends with a failure of its own class.

    `lost_stage` is the stage that the engine lost; None when the engine itself is the one that failed.
    """

    lost_stage: int | None
    detail: str


ToEngine = Hello | Loaded | StepDone | DrainRequested | Pong
ToStage = Welcome | Refused | StepPlan | WorkOutstanding | Shutdown | GroupFailed | Ping
