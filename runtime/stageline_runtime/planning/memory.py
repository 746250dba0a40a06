"""What a stage holds and what its host has room for: weights, the largest step, the smallest cache. Pure.

The engine's cut, its first cache sizing and `stageline plan` share this arithmetic, so a cut that is found here can be
served and one that can't is refused before any weight is read. What a step takes is counted from shapes here; a stage
that has loaded measures it, and the cache is made by that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from stageline_api.runtime_config import LayerRange, RuntimeConfig
from stageline_runtime.model_facts.expert_cut import rank_layer_parameters
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.model_facts.model_shapes import end_parameters
from stageline_runtime.model_facts.rank_cut import head_rows, part_of_layers

USABLE_SHARE = 0.9
"""Of a machine's memory. The rest is for those who share it: the engine, the system, files being read."""

USABLE_DEVICE_SHARE = 0.97
"""Of a device's memory, which is the stages' alone. The rest is for what is made after the cache: the buffers of links
to peers that NCCL makes, the pool of captured graphs, fragments between allocations."""

LOGIT_COPIES_BYTES = 40
"""Bytes that one logit takes while its row is sampled: float32 twice, and float64 scores, noise and their sums."""

REPORT_BYTES = 32 << 20
"""What logits take at once of a prompt's tokens whose log probabilities are asked for; it decides over how many."""

REPORT_LOGIT_BYTES = 16
"""Bytes of one such logit: in the model's type, as float32, its log probability, and what looks for the likeliest."""

HIDDEN_RING = 4
"""Buffers of hidden tensors in each direction of a link between devices."""

FEEDBACK_RING = 8
"""Buffers of sampled rows on the first and the last stage."""

FEEDBACK_WIDTH = 1
"""64-bit numbers of a row of feedback: the newest token."""

FEEDBACK_ROW_BYTES = 8 * FEEDBACK_WIDTH

_FLOAT32_BYTES = 4
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRoom:
    """Where a stage runs and how much memory is free there. Stages with the same `host` share it."""

    host: str
    available_bytes: int
    is_device: bool = False

    @property
    def usable_bytes(self) -> int:
        """What stages may take of it."""
        return int(self.available_bytes * (USABLE_DEVICE_SHARE if self.is_device else USABLE_SHARE))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoom:
    """Stages that share a host, and the most layers that fit there together (negative when not even the ends fit)."""

    stages: tuple[int, ...]
    most_layers: int


def usable_bytes(rooms: Iterable[StageRoom]) -> int:
    """Bytes that stages of one host may take together, from what each saw there at a moment of its own."""
    return min(room.usable_bytes for room in rooms)


def report_rows(vocab_size: int) -> int:
    """Over how many of a prompt's tokens the head runs at once for their log probabilities."""
    return max(1, REPORT_BYTES // (vocab_size * REPORT_LOGIT_BYTES))


def link_ring_bytes(hidden_bytes: int, rows: int, *, is_first: bool, is_last: bool) -> int:
    """Device memory of a stage's rings for links: hidden tensors of up to `hidden_bytes`, feedback of up to `rows`."""
    if is_first and is_last:
        return 0
    feedback = FEEDBACK_RING * rows * FEEDBACK_ROW_BYTES if is_first or is_last else 0
    return HIDDEN_RING * hidden_bytes * ((not is_first) + (not is_last)) + feedback


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestStep:
    """The largest plan of a group: so many tokens run through the layers, so many rows are sampled."""

    tokens: int
    rows: int

    @classmethod
    def of(cls, config: RuntimeConfig) -> "LargestStep":
        """A plan samples each sequence once, whatever cohort it is of, and once more for each of its drafts."""
        drafts = 0 if config.speculative is None else config.speculative.tokens
        rows = min(config.max_num_seqs * (drafts + 1), config.max_num_batched_tokens)
        return cls(tokens=config.max_num_batched_tokens, rows=rows)

    def bytes_of(
        self, config: ModelConfig, *, is_last: bool, element_bytes: int, ranks: int = 1, experts: int = 1
    ) -> int:
        """What it takes beside weights and cache, counted from shapes; kernels' own workspaces are not known here.

        One layer runs at a time: of each token the residual stream twice, a norm's float32, and what attention or the
        feed-forward block holds at once, whichever is more. The last stage's logits come after the layers: those that
        are sampled from, then, a few rows at a time, those that log probabilities of a prompt are made of. With several
        `ranks` it is what one of them takes: of heads and columns its part, of the logits all, which they gather. With
        `experts` cut over ranks, each of which runs so many tokens, it is what one takes: all else of its own tokens,
        but its experts see those of all ranks.
        """
        config = part_of_layers(config, ranks)
        attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
        per_token = element_bytes * (2 * config.hidden_size + max(attention, _feed_forward_width(config, experts)))
        layers = self.tokens * (per_token + _FLOAT32_BYTES * config.hidden_size)
        if not is_last:
            return layers
        reported = min(self.tokens, report_rows(config.vocab_size)) * REPORT_LOGIT_BYTES
        return max(layers, config.vocab_size * max(self.rows * LOGIT_COPIES_BYTES, reported))


def _feed_forward_width(config: ModelConfig, experts: int = 1) -> int:
    """Elements of one token in a feed-forward block: gate, up and their product, of each expert that it picks.

    With `experts` cut over ranks, so many tokens come together for each own one: gathered, with all that they pick,
    which may be held here, and with the sum of that.
    """
    mixture = config.mixture
    if mixture is None:
        return 3 * config.intermediate_size
    picked = mixture.experts_per_token * (3 * mixture.intermediate_size + config.hidden_size)
    exchanged = 2 * config.hidden_size if experts > 1 else 0
    return max(experts * (picked + exchanged), 3 * config.intermediate_size)


def weight_bytes(
    config: ModelConfig,
    layers: LayerRange,
    *,
    is_first: bool,
    is_last: bool,
    element_bytes: int,
    ranks: int = 1,
    experts: int = 1,
) -> int:
    """Bytes of the weights of a stage, of one of its `ranks`, or of one of those that its `experts` are cut over, from
    the config alone."""
    part = part_of_layers(config, ranks)
    held = sum(rank_layer_parameters(part, layer, experts) for layer in range(layers.first, layers.last + 1))
    return element_bytes * (held + rank_end_parameters(config, ranks, is_first=is_first, is_last=is_last))


def rank_end_parameters(config: ModelConfig, ranks: int, *, is_first: bool, is_last: bool) -> int:
    """Elements that one of `ranks` holds for being of an end: the whole embedding, and its rows of the head."""
    whole = end_parameters(config, is_first=is_first, is_last=is_last)
    if ranks == 1 or not is_last:
        return whole
    return whole - (config.vocab_size - head_rows(config.vocab_size, ranks)) * config.hidden_size


def largest_layer_parameters(config: ModelConfig, ranks: int = 1, *, experts: int = 1) -> int:
    """Weights of the largest layer: what a layer is taken to weigh before it is known which ones a stage gets."""
    config = part_of_layers(config, ranks)
    return max(rank_layer_parameters(config, layer, experts) for layer in range(config.num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMemory:
    """What a draft model takes on the last stage, which holds all of it."""

    weight_bytes: int
    step_bytes: int
    token_bytes: int
    """Keys and values of one token."""

    @classmethod
    def of(cls, draft: ModelConfig, step: LargestStep, element_bytes: int) -> "DraftMemory":
        """By shapes; `step` is the group's largest, whose tokens it catches up with at once."""
        layers = LayerRange(first=0, last=draft.num_layers - 1)
        token_bytes = draft.kv_bytes_per_token(draft.num_layers, element_bytes)
        weights = weight_bytes(draft, layers, is_first=True, is_last=True, element_bytes=element_bytes)
        taken = step.bytes_of(draft, is_last=True, element_bytes=element_bytes)
        return cls(weight_bytes=weights, step_bytes=taken, token_bytes=token_bytes)

    def of_ranks(self, ranks: int) -> "DraftMemory":
        """What it takes where each of `ranks` drafts for requests of its own: a token is on one of them alone."""
        return replace(self, weight_bytes=ranks * self.weight_bytes, step_bytes=ranks * self.step_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutMemory:
    """What a cut must fit: the stages' rooms, in stage order, and the shape of what goes into them.

    Where stages have `ranks`, what is counted by stage is what one of its ranks takes; a device's room is that rank's
    alone, a host's memory is taken by all of them.
    """

    config: ModelConfig
    rooms: tuple[StageRoom, ...]
    max_model_len: int
    largest_step: LargestStep
    element_bytes: int
    draft: ModelConfig | None = None
    """The model that the last stage drafts with."""
    ranks: int = 1
    """Of each stage. Of those of the last one only the first drafts."""
    experts: int = 1
    """Ranks of each stage that its experts are cut over; not with several `ranks`. A sequence is on one of them alone,
    with all heads; each of the last stage drafts for its own."""

    def ranks_in_room(self, stage: int) -> int:
        """How many of the stage's ranks take from its room."""
        return 1 if self.rooms[stage].is_device else self.ranks * self.experts

    def token_bytes_in_room(self, stage: int, num_layers: int) -> int:
        """Keys and values of one token, of all ranks that share the stage's room and hold some of them; a draft model's
        are on one rank alone."""
        holders = 1 if self.experts > 1 else self.ranks_in_room(stage)
        draft = self.draft_of(stage)
        return holders * self._own_token_bytes(num_layers) + (0 if draft is None else draft.token_bytes)

    def draft_of(self, stage: int) -> DraftMemory | None:
        """What the draft model takes on `stage`; None where it holds none."""
        if self.draft is None or stage != len(self.rooms) - 1:
            return None
        return DraftMemory.of(self.draft, self.largest_step, self.element_bytes)

    def weight_bytes(self, stage: int, num_layers: int) -> int:
        """Weights of `stage` with `num_layers` layers; where layers differ, enough for the largest ones."""
        draft = self.draft_of(stage)
        return self._own_weight_bytes(stage, num_layers) + (0 if draft is None else draft.weight_bytes)

    def token_bytes(self, stage: int, num_layers: int) -> int:
        """Keys and values of one token on `stage` with `num_layers` layers."""
        draft = self.draft_of(stage)
        return self._own_token_bytes(num_layers) + (0 if draft is None else draft.token_bytes)

    def step_bytes(self, stage: int) -> int:
        """What the largest step takes on `stage`: of its layers, or of the draft model, which doesn't run with them."""
        draft = self.draft_of(stage)
        return max(self._own_step_bytes(stage), 0 if draft is None else draft.step_bytes)

    def fixed_in_room(self, stage: int, num_layers: int) -> int:
        """What all ranks that share the stage's room take whatever their cache: weights, and the largest step.

        Of ranks that share layers only the first has the draft model, of those that share experts each.
        """
        ranks = self.ranks_in_room(stage)
        weights, step = ranks * self._own_weight_bytes(stage, num_layers), ranks * self._own_step_bytes(stage)
        if (draft := self.draft_of(stage)) is not None:
            beside = draft.of_ranks(min(ranks, self.experts))
            weights, step = weights + beside.weight_bytes, max(step, beside.step_bytes)
        return weights + step

    def needed_in_room(self, stage: int, num_layers: int) -> int:
        """The same, and the smallest cache: `max_model_len` tokens, of each rank that has sequences of its own."""
        sequences = 1 if self.rooms[stage].is_device else self.experts
        cache = sequences * self.token_bytes_in_room(stage, num_layers) * self.max_model_len
        return self.fixed_in_room(stage, num_layers) + cache

    def _own_weight_bytes(self, stage: int, num_layers: int) -> int:
        """Of one rank, its draft model left out; so with the others."""
        is_last = stage == len(self.rooms) - 1
        ends = rank_end_parameters(self.config, self.ranks, is_first=stage == 0, is_last=is_last)
        layer = largest_layer_parameters(self.config, self.ranks, experts=self.experts)
        return self.element_bytes * (num_layers * layer + ends)

    def _own_token_bytes(self, num_layers: int) -> int:
        return part_of_layers(self.config, self.ranks).kv_bytes_per_token(num_layers, self.element_bytes)

    def _own_step_bytes(self, stage: int) -> int:
        is_last = stage == len(self.rooms) - 1
        step = self.largest_step
        layers = step.bytes_of(
            self.config, is_last=is_last, element_bytes=self.element_bytes, ranks=self.ranks, experts=self.experts
        )
        if not self.rooms[stage].is_device:
            return layers
        hidden_bytes = step.tokens * self.config.hidden_size // self.ranks * self.element_bytes
        return layers + link_ring_bytes(hidden_bytes, step.rows, is_first=stage == 0, is_last=is_last)

    def stages_of_hosts(self) -> dict[str, list[int]]:
        """Stages of each host, hosts in the order in which stages first name them."""
        stages: dict[str, list[int]] = {}
        for stage, room in enumerate(self.rooms):
            stages.setdefault(room.host, []).append(stage)
        return stages

    def usable_bytes_of(self, stages: Sequence[int]) -> int:
        return usable_bytes(self.rooms[stage] for stage in stages)

    def shortages(self, counts: Sequence[int]) -> list[tuple[list[int], int]]:
        """Stages of a host and the bytes they lack there, for each host that can't hold `counts` layers."""
        lacking = []
        for stages in self.stages_of_hosts().values():
            needed = sum(self.needed_in_room(stage, counts[stage]) for stage in stages)
            missing = needed - self.usable_bytes_of(stages)
            if missing > 0:
                lacking.append((stages, missing))
        return lacking

    def host_rooms(self) -> tuple[HostRoom, ...]:
        """The same in whole layers, as `partition` counts."""
        rooms = []
        layer_bytes = self.needed_in_room(0, 1) - self.needed_in_room(0, 0)
        for stages in self.stages_of_hosts().values():
            free = self.usable_bytes_of(stages) - sum(self.needed_in_room(stage, 0) for stage in stages)
            rooms.append(HostRoom(stages=tuple(stages), most_layers=free // layer_bytes))
        return tuple(rooms)


def mebibytes(size_bytes: int) -> int:
    """Rounded up, so that what is missing never reads as nothing."""
    return -(-size_bytes // MEBIBYTE)
