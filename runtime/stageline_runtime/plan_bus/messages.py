"""What the engine and the stages say to each other on the plan bus: one frozen struct per thing said.

The handshake: the engine greets a connection with a `Challenge`, the stage says `Hello`, the engine answers all of them
at once with `Welcome` (the cut and the slots), each stage with a device loads its weights and says `Measured`, the
engine tells all of them at once with `CacheSized` how large the cache is, a stage that has its cache, joined the
rendezvous and warmed up says `Loaded`. After that the engine sends `StepPlan`s in `seq` order to every stage and the
last stage answers each with `StepDone`, and a plan with draft steps with `Drafted` as well. Encoded with msgpack;
never pickled.
"""

import enum
from typing import Annotated, NamedTuple

from msgspec import Meta

from stageline_runtime.plan_bus.prompt_report import PromptReport
from stageline_runtime.plan_bus.step_plan import (
    BusProtocolError,
    Count,
    GraphMode,
    Message,
    PlanRow,
    RequestSampling,
    SlotBlocks,
    SlotFill,
    StepPlan,
)

__all__ = [
    "BusProtocolError",
    "GraphMode",
    "PlanRow",
    "PromptReport",
    "RequestSampling",
    "SlotBlocks",
    "SlotFill",
    "StepPlan",
]
"""Others import these from here."""

PROTOCOL_VERSION = 20


class TransportKind(enum.StrEnum):
    """How tensors cross between the group's stages: from host memory, on connections of the runtime's own; the same
    over pinned memory where a stage has a device; or by NCCL."""

    HOST = "host"
    STAGED = "staged"
    NCCL = "nccl"


class Place(NamedTuple):
    """Where a process stands in its group: the stage, and the rank within it."""

    stage: int
    rank: int = 0

    def words(self, ranks: int) -> str:
        """For log lines and errors: names the rank only if a stage has several."""
        return f"stage {self.stage}" if ranks == 1 else f"stage {self.stage}, rank {self.rank}"


Port = Annotated[int, Meta(ge=1, le=65535)]


class LinkAddress(NamedTuple):
    """Where a stage listens for the stage before it."""

    host: str
    port: Port


class Challenge(Message, frozen=True):
    """Engine to a new connection, first message: prove with this that you know the bus's token (`challenge`)."""

    nonce: str


class Hello(Message, frozen=True):
    """Stage to engine, first message, in answer to the `Challenge`."""

    protocol: int
    stage: int
    stage_count: int
    incarnation: int
    proof: str
    """Of the bus's token, for this connection (`challenge.proof_of`)."""
    host: str
    """Identity of the machine: stages on one share its cores and its clock."""
    available_bytes: Count
    health_url: str
    """Base URL of the stage's health endpoint, for clients that ask the engine where its stages are."""
    device: str = ""
    """Identity of the device that the stage computes on; `available_bytes` is its memory. Empty for the CPU."""
    container: str = ""
    """Identity of the container: stages in one share its CPU limit."""
    memory: str = ""
    """On the CPU: identity of the memory that `available_bytes` is of, where the machine's is not meant."""
    weights: str = ""
    """Digest of the weights where this stage loads them from; empty where it can't tell."""
    rank: int = 0
    """Which of the stage's processes this is."""
    ranks: int = 1
    """How many it has."""
    has_bfloat16_units: bool = True
    """Of its CPU; also true with a device, on which nothing is computed by the CPU."""
    queues_bfloat16_experts: bool = False
    """Whether its device runs a mixture's experts in bfloat16 without a wait, so that they can be captured."""
    link_address: LinkAddress | None = None
    """Where this rank listens for the same rank of the stage before; None where tensors don't come that way."""


class Measured(Message, frozen=True):
    """Stage with a device to engine: the weights are in place, and the largest step has run once, with little cache."""

    stage: int
    held_bytes: Count
    """What loading took of the memory that `Hello` called available."""
    step_bytes: Count
    """The most that the largest step took beyond that while it ran."""


class Loaded(Message, frozen=True):
    """Stage to engine: weights and KV cache are in place, peers are connected, a warm-up step has crossed."""

    stage: int
    memory_bytes: Count


class TokenLogprobs(Message, frozen=True):
    """Natural log probabilities under the raw logits: of the sampled token, and (token id, value) best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class SampledRow(Message, frozen=True):
    """What was sampled for one row: one token, or for a verifying row the drafts that hold and the token after them.

    The engine knows the drafts, so their number is enough.
    """

    slot: int
    generation: int
    token: int
    """The newest: the only one that is no draft."""
    logprobs: TokenLogprobs | None = None
    """There when the request asked for them."""
    failure: str | None = None
    """Why the request can't continue; its token then means nothing."""
    num_sampled: Count = 1
    """Tokens that count, the newest among them."""
    draft_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the drafts that hold, when the request asked for them."""


class StepDone(Message, frozen=True):
    """Last stage to engine: plan `seq` is finished; `rows` holds a token for each row that needed one."""

    seq: Count
    rows: tuple[SampledRow, ...]
    reports: tuple[PromptReport, ...] = ()
    """Log probabilities of prompts, for the rows with `report_targets` and requests that still have their slots."""


class DraftedRow(Message, frozen=True):
    """What the draft model says comes next in one slot; nothing where it has not caught up, or at its context's end."""

    slot: int
    generation: int
    position: Count
    """Of the first of `token_ids`: the one after the newest sampled token."""
    token_ids: tuple[int, ...]


class Drafted(Message, frozen=True):
    """Last stage to engine, after the `StepDone` of a plan with draft steps: one entry for each row that wants some."""

    seq: Count
    rows: tuple[DraftedRow, ...]
    step_seconds: float
    """Average time of one draft model step, without catching up; 0 where the plan did only that."""


class Computing(Message, frozen=True):
    """Stage to engine: it still computes plan `seq`, which takes long because the stage's machine is busy. A stage
    that hangs says it no longer once its own limit is over."""

    seq: Count


class DrainRequested(Message, frozen=True):
    """Stage to engine: this pod was asked to end; let the group finish its streams and shut down."""

    stage: int


class PlanMoments(Message, frozen=True):
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


class StepTimes(Message, frozen=True):
    """Stage to engine: when it ran a plan with `report_times`, in nanoseconds of the stage's clock."""

    seq: int
    kind: str
    """What the compute counts as: `prefill`, `decode`, `mixed`."""
    ready: int
    """Its input was there: hidden tensor, or the feedback that the plan needs."""
    end: int
    busy: int
    """Of the time up to the end, how long it computed."""
    waited: int
    """How long it had waited for its input."""


class Pong(Message, frozen=True):
    """Stage to engine: answer to a `Ping`, with the stage's clock and what it knows of its newest plans."""

    ping_nanoseconds: int
    """The engine's clock as the `Ping` had it."""
    received_nanoseconds: int
    """The stage's clock when it took the `Ping` off the bus."""
    sent_nanoseconds: int
    """The stage's clock when it answered."""
    moments: tuple[PlanMoments, ...]


class GuideReady(Message, frozen=True):
    """Last stage to engine: the grammar asked for by `PrepareGuide` is there, or can't be."""

    number: int


class Welcome(Message, frozen=True):
    """Engine to stage: what to load and how large to make things.

    A slot is `slot_tokens` of address space; how much memory is behind all of them, `CacheSized` says later.
    """

    first_layer: int
    last_layer: int
    model_dir: str
    dtype: str
    """What all stages compute in."""
    num_cohorts: int
    num_slots: int
    slot_tokens: int
    """Capacity of one slot in tokens (`max_model_len`)."""
    max_step_tokens: int
    """Most tokens a plan carries."""
    stages_on_host: int
    """Stages of this group that share the machine, and so its cores."""
    stages_in_container: int = 1
    """Those of them that share this one's container, and so its CPU limit."""
    transport: TransportKind = TransportKind.HOST
    graphs: GraphMode = GraphMode.OFF
    """The most that plans of this group ask for."""
    draft_dir: str = ""
    """Where the model lies that drafts; empty for a stage that drafts nothing."""
    layer_counts: tuple[int, ...] = ()
    """Number of layers of every stage in order, for engines with nodes that each need the whole cut."""
    dtype_reason: str = ""
    """Why it is `dtype`, for people."""
    next_address: LinkAddress | None = None
    """The `link_address` of the stage that this one sends to, the first one's for the last."""


class CacheSized(Message, frozen=True):
    """Engine to stage: make the KV cache, of `num_blocks` blocks (`BLOCK_TOKENS`) in each of the stage's layers. Ranks
    that have slots of their own have as many each (`rank_of_slot`).
    """

    num_blocks: int


class Refused(Message, frozen=True):
    """Engine to stage: the handshake failed; the stage exits 64 with this sentence."""

    detail: str


class WorkOutstanding(Message, frozen=True):
    """Engine to stage: whether any request is unfinished; separates starved from idle in the stage's clock."""

    outstanding: bool


class Shutdown(Message, frozen=True):
    """Engine to stage: drained; exit 0. `reason` names the origin of the drain request."""

    reason: str


class PeerComputes(Message, frozen=True):
    """Engine to stage: another stage still computes plan `seq` (`Computing`), so waiting for it is no hang."""

    seq: Count


class Ping(Message, frozen=True):
    """Engine to stage: tell me your clock. Answered between two plans."""

    engine_nanoseconds: int


class PrepareGuide(Message, frozen=True):
    """Engine to the last stage: compile this schema beside the steps; its request comes once you say it's done."""

    number: int
    schema: str


class GroupFailed(Message, frozen=True):
    """Engine to stage: the group can't continue, and the engine ends; the stage ends with a failure of its own class.

    `lost_stage` is the stage that the engine lost; None when the engine itself failed.
    """

    lost_stage: int | None
    detail: str


ToEngine = Hello | Measured | Loaded | Computing | StepDone | Drafted | StepTimes | DrainRequested | Pong | GuideReady
ToStage = (
    Challenge
    | Welcome
    | CacheSized
    | Refused
    | StepPlan
    | WorkOutstanding
    | Shutdown
    | GroupFailed
    | PeerComputes
    | Ping
    | PrepareGuide
)
