"""What a stage holds and what its host has room for: weights, the largest step, the smallest cache. Pure.

The engine's cut, its first cache sizing and `stageline plan` share this arithmetic, so a cut that is found here can be
served and one that can't is refused before any weight is read. What a step takes is counted from shapes here; a stage
that has loaded measures it, and the cache is made by that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from stageline_api.runtime_config import LayerRange, RuntimeConfig
from stageline_runtime.model_facts.model_config import ModelConfig
from stageline_runtime.model_facts.model_shapes import end_parameters, layer_size
from stageline_runtime.model_facts.rank_cut import part_of_layers

USABLE_SHARE = 0.9
"""Fraction of a machine's memory. Other users share the rest: the engine, the system, files being read."""

USABLE_DEVICE_SHARE = 0.97
"""Fraction of a device's memory, which only stages use. The rest is for later allocations: NCCL's link buffers, the
pool of captured graphs, fragmentation."""

LOGIT_COPIES_BYTES = 40
"""Bytes that one logit takes while its row is sampled: float32 twice, and float64 scores, noise and their sums."""

REPORT_BYTES = 32 << 20
"""Memory for the logits of prompt tokens with requested log probabilities; it bounds the tokens computed at once."""

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
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
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
    def of(cls, config: RuntimeConfig, *, on_gpus: bool) -> "LargestStep":
        """A plan samples each sequence once, whatever cohort it is of, and once more for each of its drafts."""
        drafts = 0 if config.speculative is None else config.speculative.tokens
        limits = config.step_limits(on_gpus=on_gpus)
        rows = min(limits.max_num_seqs * (drafts + 1), limits.max_num_batched_tokens)
        return cls(tokens=limits.max_num_batched_tokens, rows=rows)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What a stage takes of its room: all of its ranks that share it."""

    stage: int
    room: StageRoom
    weight_bytes: int
    step_bytes: int
    """Of the largest step, beside weights and cache."""
    token_bytes: int
    """Keys and values of one token."""
    num_ranks: int = 1
    num_caches: int = 1
    """Of these ranks together, each cache with sequences of its own."""

    @property
    def fixed_bytes(self) -> int:
        """What it takes whatever its cache."""
        return self.weight_bytes + self.step_bytes

    def needed_bytes(self, max_model_len: int) -> int:
        """With the smallest cache: one sequence of `max_model_len` tokens in each."""
        return self.fixed_bytes + self.num_caches * self.token_bytes * max_model_len

    def with_draft(self, draft: "StageMemory", num_drafting: int = 1) -> "StageMemory":
        """The same with a draft model on `num_drafting` ranks, which doesn't run with the layers. A token is on one."""
        return replace(
            self,
            weight_bytes=self.weight_bytes + num_drafting * draft.weight_bytes,
            step_bytes=max(self.step_bytes, num_drafting * draft.step_bytes),
            token_bytes=self.token_bytes + draft.token_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The stages that share a host or device, and what they may take of it together."""

    stages: tuple[StageMemory, ...]

    @property
    def usable_bytes(self) -> int:
        """From what each stage saw there at a moment of its own."""
        return min(stage.room.usable_bytes for stage in self.stages)

    @property
    def cache_tokens(self) -> int:
        """Capacity of each cache beside weights and the largest steps; below 0 where these alone don't fit."""
        free = self.usable_bytes - sum(stage.fixed_bytes for stage in self.stages)
        return free // sum(stage.num_caches * stage.token_bytes for stage in self.stages)

    def missing_bytes(self, max_model_len: int) -> int:
        """What it lacks for all its stages with the smallest cache; below 0 where there is more."""
        return sum(stage.needed_bytes(max_model_len) for stage in self.stages) - self.usable_bytes


def hosts_of(stages: Iterable[StageMemory]) -> tuple[HostMemory, ...]:
    """In the order in which stages first name them."""
    found: dict[str, tuple[StageMemory, ...]] = {}
    for stage in stages:
        found[stage.room.host] = (*found.get(stage.room.host, ()), stage)
    return tuple(HostMemory(stages=each) for each in found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """The memory of a group's stages, in stage order, and its uses."""

    config: ModelConfig
    rooms: tuple[StageRoom, ...]
    max_model_len: int
    largest_step: LargestStep
    element_bytes: int
    draft: ModelConfig | None = None
    """The model that the last stage drafts with."""
    ranks: int = 1
    """Of each stage, which share every layer. Of those of the last one only the first drafts."""
    experts: int = 1
    """Ranks of each stage that share the experts alone; not with several `ranks`. A sequence is on one of them, with
    all heads; each of the last stage drafts for its own."""

    def stages_of(self, cut: Sequence[LayerRange]) -> tuple[StageMemory, ...]:
        """What each stage takes with the layers of `cut`."""
        return tuple(self._stage(stage, layers.count, self._elements(layers)) for stage, layers in enumerate(cut))

    def stages_by_count(self, counts: Sequence[int]) -> tuple[StageMemory, ...]:
        """What each takes with so many layers, whichever they are: where they differ, the largest are counted."""
        largest = max(self._elements(LayerRange(first=layer, last=layer)) for layer in range(self.config.num_layers))
        return tuple(self._stage(stage, count, count * largest) for stage, count in enumerate(counts))

    def shortages(self, stages: Sequence[StageMemory]) -> list[HostMemory]:
        """The hosts that can't hold their stages."""
        return [host for host in hosts_of(stages) if host.missing_bytes(self.max_model_len) > 0]

    def host_rooms(self) -> tuple[HostRoom, ...]:
        """The rooms in whole layers, as `partition` counts."""
        none, one = (self.stages_by_count([count] * len(self.rooms)) for count in (0, 1))
        layer_bytes = one[0].needed_bytes(self.max_model_len) - none[0].needed_bytes(self.max_model_len)
        return tuple(
            HostRoom(
                stages=tuple(stage.stage for stage in host.stages),
                most_layers=-host.missing_bytes(self.max_model_len) // layer_bytes,
            )
            for host in hosts_of(none)
        )

    def _elements(self, layers: LayerRange) -> int:
        """Of `layers`, what one rank holds."""
        part = part_of_layers(self.config, self.ranks)
        return sum(layer_size(part, layer).held(self.experts) for layer in range(layers.first, layers.last + 1))

    def _stage(self, stage: int, num_layers: int, elements: int) -> StageMemory:
        """Of a stage, one rank of which holds so many `elements` of layers."""
        room, step = self.rooms[stage], self.largest_step
        is_first, is_last = stage == 0, stage == len(self.rooms) - 1
        ranks_here = 1 if room.is_device else self.ranks * self.experts
        ends = end_parameters(self.config, self.ranks, is_first=is_first, is_last=is_last)
        step_bytes = step.bytes_of(
            self.config, is_last=is_last, element_bytes=self.element_bytes, ranks=self.ranks, experts=self.experts
        )
        if room.is_device:
            hidden_bytes = step.tokens * self.config.hidden_size // self.ranks * self.element_bytes
            step_bytes += link_ring_bytes(hidden_bytes, step.rows, is_first=is_first, is_last=is_last)
        own_token = part_of_layers(self.config, self.ranks).kv_bytes_per_token(num_layers, self.element_bytes)
        taken = StageMemory(
            stage=stage,
            room=room,
            weight_bytes=ranks_here * self.element_bytes * (elements + ends),
            step_bytes=ranks_here * step_bytes,
            # Ranks that share layers hold a token's heads together, of those that share experts one has it.
            token_bytes=own_token * (1 if self.experts > 1 else ranks_here),
            num_ranks=ranks_here,
            num_caches=1 if room.is_device else self.experts,
        )
        if self.draft is None or not is_last:
            return taken
        return taken.with_draft(draft_memory(self.draft, step, self.element_bytes), taken.num_caches)


def draft_memory(draft: ModelConfig, step: LargestStep, element_bytes: int) -> StageMemory:
    """Memory of a draft model on the last stage, which holds all of it.

    `step` is the group's largest; the draft model catches up with its tokens at once.
    """
    nowhere = StageRoom(host="", available_bytes=0)
    alone = GroupMemory(config=draft, rooms=(nowhere,), max_model_len=0, largest_step=step, element_bytes=element_bytes)
    return alone.stages_of([LayerRange(first=0, last=draft.num_layers - 1)])[0]


def mebibytes(size_bytes: int) -> int:
    """Rounded up, so that a shortage never reads as 0."""
    return -(-size_bytes // MEBIBYTE)
