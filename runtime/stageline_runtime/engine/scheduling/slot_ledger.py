"""Which request holds which KV slot and cache blocks: the accounting for admission and growth. Pure.

A slot is a request's number, under which all stages keep its state, and its block table: part `i` of its positions
is in the `i`-th block. A reassigned slot gets a new generation, which identifies late rows of its former holder.
Requests with a common prefix share its blocks (`BlockPool`), and none of them writes to these: each computes into
blocks of its own. Where ranks divide a mixture's experts, each holds the keys and values of its own slots
(`rank_of_slot`), in a block pool of its own.

The next plan sends every change of a table to the stages. Only later plans can read what a plan's rows write. So a
block is cached once the plan that fills it is made, and only later plans write to a released block again.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from stageline_runtime.engine.scheduling.block_pool import BlockPool, CachedBlock, Tokens
from stageline_runtime.engine.scheduling.cache_sizing import CacheSize
from stageline_runtime.plan_bus.messages import SlotBlocks
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of, rank_of_slot

Names = tuple[tuple[str, int], ...]
"""Names of beginnings of a prompt, and how many tokens each has."""


@dataclass(slots=True)
class _Holder:
    """What the request that has a slot holds of the cache."""

    salt: str
    names: Names
    blocks: list[int] = field(default_factory=list)
    cached: list[CachedBlock] = field(default_factory=list)
    """The first of its blocks, those that are cached."""


class SlotLedger:
    """Free and held slots, and their blocks. Invariant: each slot is either free or held, never both."""

    def __init__(
        self,
        num_cohorts: int,
        num_slots: int,
        slot_tokens: int,
        num_blocks: int | None = None,
        *,
        prefix_cache: bool = False,
        num_ranks: int = 1,
    ) -> None:
        """`num_blocks`, of each rank's pool; None: enough for all of its slots. With fewer than one slot may take,
        nothing could be promised. `num_ranks`: among which the slots are divided.
        """
        most = -(-num_slots // num_ranks) * blocks_of(slot_tokens)
        of_pool = most if num_blocks is None else min(num_blocks, most)
        assert of_pool >= blocks_of(slot_tokens), f"{num_blocks} blocks don't hold {slot_tokens} tokens"
        self.num_cohorts = num_cohorts
        self.num_slots = num_slots
        self.slot_tokens = slot_tokens
        self.num_ranks = num_ranks
        self._pools = tuple(BlockPool(of_pool) for _ in range(num_ranks))
        self.caches_prefixes = prefix_cache
        self._generation = [0] * num_slots
        self._free = [set(range(rank, num_slots, num_ranks)) for rank in range(num_ranks)]
        self._holders: dict[int, _Holder] = {}
        self._changes: list[SlotBlocks] = []

    @classmethod
    def of(cls, size: CacheSize, *, prefix_cache: bool) -> "SlotLedger":
        return cls(
            size.num_cohorts,
            size.num_slots,
            size.slot_tokens,
            size.num_blocks,
            prefix_cache=prefix_cache,
            num_ranks=size.num_ranks,
        )

    @property
    def num_blocks(self) -> int:
        """Of all pools."""
        return sum(pool.num_blocks for pool in self._pools)

    @property
    def held_slots(self) -> int:
        return len(self._holders)

    @property
    def held_blocks(self) -> int:
        """Blocks of all pools that some request uses."""
        return sum(pool.num_blocks - pool.num_available for pool in self._pools)

    @property
    def cached_blocks(self) -> int:
        """Blocks of all pools that no request uses and that may still be of use."""
        return sum(pool.num_unused for pool in self._pools)

    def rank_of(self, slot: int) -> int:
        """The rank that provides a slot's blocks."""
        return rank_of_slot(slot, self.num_ranks)

    def available_blocks(self, rank: int) -> int:
        return self._pools[rank].num_available

    def has_free_slot(self, rank: int) -> bool:
        return bool(self._free[rank])

    def blocks(self, slot: int) -> tuple[int, ...]:
        """The table of a held slot."""
        return tuple(self._holders[slot].blocks)

    def num_cached(self, slot: int) -> int:
        """How many of a held slot's blocks are cached."""
        return len(self._holders[slot].cached)

    def num_blocks_of(self, slot: int) -> int:
        """Length of the table of a held slot."""
        return len(self._holders[slot].blocks)

    def spare_blocks(
        self, num_inputs: int, reusable: Tokens, salt: str, rank: int, without: Collection[int] = ()
    ) -> int:
        """Available blocks of `rank` that a request would leave, once the slots `without` are released; negative
        when it does not fit. It takes no block that other requests also use."""
        pool = self._pools[rank]
        given_up = Counter(block for slot in without for block in self._holders[slot].blocks)
        freed = sum(pool.references(block) == count for block, count in given_up.items())
        found = self._find(pool, reusable, salt)
        shared = sum(pool.references(cached.number) > given_up[cached.number] for cached in found)
        return pool.num_available + freed - (blocks_of(num_inputs) - shared)

    def named_prefixes(self) -> set[str]:
        """Names of those beginnings of prompts that are cached up to their last whole block."""
        return set().union(*(pool.names() for pool in self._pools))

    def take(
        self,
        inputs: Tokens,
        salt: str = "",
        names: Names = (),
        *,
        reusable: Tokens | None = None,
        ranks: Collection[int] = (0,),
    ) -> tuple[int, int, int]:
        """Give out a slot with blocks for `inputs`; returns slot, generation and how many inputs are cached already.

        `reusable`: only of these first inputs, the last of which is computed. `ranks`: of one of these, each of which
        has a free slot and enough blocks: the least busy one, since a step is as long as its fullest rank's part, and
        of equals the one that has most of the inputs.
        """
        assert len(inputs) <= self.slot_tokens, f"{len(inputs)} tokens do not fit a slot of {self.slot_tokens}"
        known = inputs if reusable is None else reusable
        found = {rank: self._find(self._pools[rank], known, salt) for rank in ranks}
        rank = max(ranks, key=lambda each: (len(self._free[each]), len(found[each])))
        slot = min(self._free[rank])
        self._free[rank].remove(slot)
        self._holders[slot] = _Holder(salt, names)
        self._generation[slot] += 1
        self._share(slot, found[rank])
        self._extend(slot, blocks_of(len(inputs)))
        return slot, self._generation[slot], len(found[rank]) * BLOCK_TOKENS

    def share_more(self, slot: int, inputs: Tokens) -> int:
        """Share the blocks that others have since cached for the prefix of `inputs`; returns how many inputs are
        then cached."""
        holder = self._holders[slot]
        found = self._find(self._pools[self.rank_of(slot)], inputs, holder.salt)
        self._share(slot, found)
        return len(holder.cached) * BLOCK_TOKENS

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Let a held slot grow to `num_tokens` tokens; False when its rank has too few blocks."""
        needed = blocks_of(num_tokens)
        if needed - len(self._holders[slot].blocks) > self.available_blocks(self.rank_of(slot)):
            return False
        self._extend(slot, needed)
        return True

    def note_full(self, slot: int, contents: Sequence[Tokens]) -> None:
        """The first blocks of a held slot that aren't cached yet are full of `contents`, a block's each. Of those that
        are cached with the same already, the slot uses the other block from now on.
        """
        holder, pool = self._holders[slot], self._pools[self.rank_of(slot)]
        start, replaced = len(holder.cached), list[tuple[int, CachedBlock]]()
        for index, tokens in enumerate(contents, start=start):
            before = holder.cached[-1] if holder.cached else None
            cached = pool.cache(holder.blocks[index], tokens, before, holder.salt)
            if cached.number != holder.blocks[index]:
                replaced.append((index, cached))
            holder.cached.append(cached)
        for index, cached in replaced:
            pool.reference(cached)
            pool.release([holder.blocks[index]])
            holder.blocks[index] = cached.number
        if replaced:
            self._changes.append(SlotBlocks(slot, replaced[0][0], tuple(holder.blocks[replaced[0][0] :])))
        self._name(slot, start)

    def give_back(self, slot: int) -> None:
        """Free a held slot; its cached content stays until its space is needed."""
        rank = self.rank_of(slot)
        self._pools[rank].release(reversed(self._holders.pop(slot).blocks))
        self._free[rank].add(slot)
        self._changes.append(SlotBlocks(slot, 0, ()))

    def take_changes(self) -> tuple[SlotBlocks, ...]:
        """What has changed in the tables since the last call, in order, for the next plan."""
        changes, self._changes = tuple(self._changes), []
        return changes

    def _find(self, pool: BlockPool, inputs: Tokens, salt: str) -> list[CachedBlock]:
        return pool.find(inputs, salt) if self.caches_prefixes else []

    def _share(self, slot: int, cached: list[CachedBlock]) -> None:
        """Let a slot's table begin with these blocks, of which it has the first; own ones in their places are free."""
        holder, pool = self._holders[slot], self._pools[self.rank_of(slot)]
        start = len(holder.cached)
        if len(cached) <= start:
            return
        for each in cached[start:]:
            pool.reference(each)
        pool.release(reversed(holder.blocks[start : len(cached)]))
        holder.blocks[start : len(cached)] = [each.number for each in cached[start:]]
        holder.cached = cached
        self._changes.append(SlotBlocks(slot, start, tuple(holder.blocks[start:])))
        self._name(slot, start)

    def _extend(self, slot: int, num_blocks: int) -> None:
        blocks, rank = self._holders[slot].blocks, self.rank_of(slot)
        pool, start = self._pools[rank], len(blocks)
        if num_blocks <= start:
            return
        pool.make_room(num_blocks - start)
        # Slots begin far apart, so that each can grow into adjacent blocks.
        home = slot * pool.num_blocks // self.num_slots
        for _ in range(start, num_blocks):
            blocks.append(pool.take(blocks[-1] + 1 if blocks else home))
        self._changes.append(SlotBlocks(slot, start, tuple(blocks[start:]), are_new=True))

    def _name(self, slot: int, start: int) -> None:
        """Name the beginnings of the prompt that end in the slot's cached blocks from `start` on."""
        holder, pool = self._holders[slot], self._pools[self.rank_of(slot)]
        for name, tokens in holder.names:
            if start < tokens // BLOCK_TOKENS <= len(holder.cached):
                pool.name(holder.cached[tokens // BLOCK_TOKENS - 1], name)
