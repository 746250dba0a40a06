"""Who holds which KV slot and how much of the cache: the accounting behind admission and growth. Pure.

A slot is one request's contiguous region of address space; `global slot = cohort * slots_per_cohort + index`. A slot
that is given out again gets a new generation, and that is how a late row of its former holder is told apart. Memory is
counted in blocks, and there may be fewer of them than the slots could take. Where ranks that divide experts have a
device each, each has a pool of blocks of its own, for its own slots. Invariant: held and cached blocks of a pool never
exceed it. A free slot keeps known content, until its slot or its blocks are needed: the longest unused first.

Where blocks are short, every loss of a slot's content is told to the stages by a trim in the next plan, before anything
is written in its place. Slots without content go first, of them the lowest of the asked-for cohort, so that the rows of
a cohort lie close together and stages can read them as one view.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from stageline_runtime.engine.scheduling.cache_sizing import CacheSize
from stageline_runtime.plan_bus.messages import SlotTrim
from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS, blocks_of, rank_of_slot

Block = tuple[int, ...]


class SlotLedger:
    """Free and held slots, and their blocks. Invariant: each slot is either free or held, never both."""

    def __init__(
        self,
        num_cohorts: int,
        slots_per_cohort: int,
        slot_tokens: int,
        num_blocks: int | None = None,
        *,
        prefix_cache: bool = False,
        num_ranks: int = 1,
        num_pools: int = 1,
    ) -> None:
        """`num_blocks`, of each pool; None: enough for all slots; with fewer than one slot may take, nothing could be
        promised. `num_ranks`: among which the slots are divided (`rank_of_slot`); `num_pools`: one, or one for each.
        """
        num_slots = num_cohorts * slots_per_cohort
        most = [len(range(pool, num_slots, num_pools)) * blocks_of(slot_tokens) for pool in range(num_pools)]
        self.num_cohorts = num_cohorts
        self.num_ranks = num_ranks
        self.num_pools = num_pools
        self.slots_per_cohort = slots_per_cohort
        self.slot_tokens = slot_tokens
        self._pool_blocks = most if num_blocks is None else [min(num_blocks, each) for each in most]
        assert self._pool_blocks[0] >= blocks_of(slot_tokens), f"{num_blocks} blocks don't hold {slot_tokens} tokens"
        self.num_blocks = sum(self._pool_blocks)
        self.prefixes = PrefixIndex() if prefix_cache else None
        self._is_short = self.num_blocks < sum(most)
        self._generation = [0] * num_slots
        self._free: dict[int, None] = dict.fromkeys(range(num_slots))
        """Longest unused first."""
        self._held: dict[int, int] = {}
        self._cached_blocks = [0] * num_pools
        self._held_blocks = [0] * num_pools
        self._trims: dict[int, int] = {}
        self._names: dict[int, tuple[tuple[str, int], ...]] = {}
        """By slot: names of beginnings of its last holder's prompt, and their tokens."""

    @classmethod
    def of(cls, size: CacheSize, *, prefix_cache: bool, num_ranks: int = 1) -> "SlotLedger":
        return cls(
            size.num_cohorts,
            size.slots_per_cohort,
            size.slot_tokens,
            size.num_blocks,
            prefix_cache=prefix_cache,
            num_ranks=num_ranks,
            num_pools=size.num_pools,
        )

    @property
    def held_slots(self) -> int:
        return len(self._held)

    @property
    def held_blocks(self) -> int:
        """Of all pools."""
        return sum(self._held_blocks)

    @property
    def cached_blocks(self) -> int:
        """Blocks of free slots that may still be of use, of all pools."""
        return sum(self._cached_blocks)

    def pool_of(self, slot: int) -> int:
        """Whose blocks a slot takes."""
        return rank_of_slot(slot, self.num_pools)

    def available_blocks(self, pool: int) -> int:
        """Blocks of a pool that can be had without taking them from a holder."""
        return self._pool_blocks[pool] - self._held_blocks[pool]

    def has_free_slot(self, pool: int) -> bool:
        return any(self.pool_of(slot) == pool for slot in self._free)

    def held_by(self, slot: int) -> int:
        return self._held[slot]

    @property
    def num_slots(self) -> int:
        return len(self._generation)

    def named_prefixes(self) -> set[str]:
        """Names of those beginnings of prompts that lie in some slot up to their last whole block."""
        if self.prefixes is None:
            return set()
        return {
            name
            for slot, names in self._names.items()
            for name, tokens in names
            if 0 < tokens // BLOCK_TOKENS <= self._cached(slot)
        }

    def take(
        self,
        cohort: int,
        inputs: tuple[int, ...],
        salt: str = "",
        names: tuple[tuple[str, int], ...] = (),
        *,
        reusable: tuple[int, ...] | None = None,
        pools: Collection[int] = (0,),
    ) -> tuple[int, int, int]:
        """Give out a slot with blocks for `inputs`; returns slot, generation and how many inputs lie in it already.

        A slot that holds a beginning of `inputs` is preferred where that is at least half of what it holds; otherwise
        the beginning can be copied from it. `reusable`: only of these first inputs, the last of which is computed.
        `pools`: of one of these, each of which has a free slot and enough blocks.
        """
        needed = blocks_of(len(inputs))
        assert len(inputs) <= self.slot_tokens, f"{len(inputs)} tokens do not fit a slot of {self.slot_tokens}"
        slot, kept = self._choose(cohort, inputs if reusable is None else reusable, salt, pools)
        pool = self.pool_of(slot)
        assert needed <= self.available_blocks(pool), f"{needed} blocks of {self.available_blocks(pool)}"
        del self._free[slot]
        self._cached_blocks[pool] -= self._cached(slot)
        self._shrink(slot, kept)
        self._held[slot] = needed
        self._held_blocks[pool] += needed
        self._reclaim(pool)
        self._names[slot] = names
        self._generation[slot] += 1
        return slot, self._generation[slot], kept * BLOCK_TOKENS

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Let a held slot take `num_tokens` tokens; False when no block of its pool is left for that."""
        missing = blocks_of(num_tokens) - self._held[slot]
        if missing > 0:
            pool = self.pool_of(slot)
            if missing > self.available_blocks(pool):
                return False
            self._held[slot] += missing
            self._held_blocks[pool] += missing
            self._reclaim(pool)
        return True

    def give_back(self, slot: int) -> None:
        """Free a held slot; what its content is known to be stays as long as there is room."""
        pool = self.pool_of(slot)
        self._held_blocks[pool] -= self._held.pop(slot)
        self._free[slot] = None
        kept = self._cached(slot)
        self._cached_blocks[pool] += kept
        self._shrink(slot, kept)

    def beginning_of(self, slot: int, inputs: tuple[int, ...], salt: str) -> tuple[int, int | None]:
        """The longest known beginning of `inputs` that can be copied to `slot`: its tokens, and the slot that holds it.

        Nothing is copied between ranks.
        """
        if self.prefixes is None:
            return 0, None
        rank = rank_of_slot(slot, self.num_ranks)
        blocks, holders = self.prefixes.match(inputs, salt, lambda each: rank_of_slot(each, self.num_ranks) == rank)
        return blocks * BLOCK_TOKENS, holders[0] if holders else None

    def take_trims(self) -> tuple[SlotTrim, ...]:
        """What has been given up since the last call, for the next plan."""
        trims, self._trims = self._trims, {}
        return tuple(SlotTrim(slot, tokens) for slot, tokens in sorted(trims.items()))

    def _cached(self, slot: int) -> int:
        return 0 if self.prefixes is None else self.prefixes.num_blocks(slot)

    def _choose(self, cohort: int, inputs: tuple[int, ...], salt: str, pools: Collection[int]) -> tuple[int, int]:
        """A free slot of `pools`, and how many blocks of it are worth keeping."""
        blocks, holders = (0, []) if self.prefixes is None else self.prefixes.match(inputs, salt)
        free = dict.fromkeys(slot for slot in self._free if self.pool_of(slot) in pools)
        in_place = [slot for slot in holders if slot in free and self._cached(slot) <= 2 * blocks]
        if in_place:
            return min(in_place, key=self._cached), blocks
        empty = [slot for slot in free if not self._cached(slot)]
        if not empty:
            slot = next(iter(free))
            return slot, blocks if slot in holders else 0
        here = [slot for slot in empty if slot // self.slots_per_cohort == cohort]
        busy = Counter(rank_of_slot(slot, self.num_ranks) for slot in self._held)
        return min(here or empty, key=lambda slot: (busy[rank_of_slot(slot, self.num_ranks)], slot)), 0

    def _shrink(self, slot: int, num_blocks: int) -> None:
        if self.prefixes is not None:
            self.prefixes.truncate(slot, num_blocks)
        if self._is_short:
            self._trims[slot] = num_blocks * BLOCK_TOKENS

    def _reclaim(self, pool: int) -> None:
        """Make room in a pool for what is held, at the cost of what is only cached."""
        for slot in self._free:
            excess = self._held_blocks[pool] + self._cached_blocks[pool] - self._pool_blocks[pool]
            if excess <= 0:
                return
            cached = self._cached(slot)
            if cached and self.pool_of(slot) == pool:
                self._cached_blocks[pool] -= min(cached, excess)
                self._shrink(slot, cached - min(cached, excess))


@dataclass(slots=True, eq=False)
class _Node:
    parent: "_Node | None"
    block: Block
    salt: str = ""
    """Of a root."""
    children: dict[Block, "_Node"] = field(default_factory=dict)
    slots: dict[int, None] = field(default_factory=dict)
    """In the order in which they came to hold it."""


class PrefixIndex:
    """Which slots hold the beginning of which token sequences: what makes a prefix reusable.

    A tree of token blocks: a path from its root is a sequence of whole blocks, and every node names the slots whose
    content begins with that path, at least one. Keys and values of a block follow from all tokens up to its end and
    from nothing else, so the path itself is the key: two sequences never share a node by chance. Each salt has a tree
    of its own, so that nobody without it can tell, by how fast an answer begins, what others have asked.
    """

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._paths: dict[int, list[_Node]] = {}

    def num_blocks(self, slot: int) -> int:
        return len(self._paths.get(slot, ()))

    def extend(self, slot: int, block: Block, salt: str = "") -> None:
        """`salt` is that of the slot's holder, and so of all its blocks."""
        assert len(block) == BLOCK_TOKENS, block
        path = self._paths.setdefault(slot, [])
        parent = path[-1] if path else self._roots.setdefault(salt, _Node(None, (), salt))
        node = parent.children.get(block)
        if node is None:
            node = parent.children[block] = _Node(parent, block)
        node.slots[slot] = None
        path.append(node)

    def truncate(self, slot: int, num_blocks: int) -> None:
        path = self._paths.get(slot, [])
        while len(path) > num_blocks:
            node = path.pop()
            del node.slots[slot]
            if not node.slots:
                assert node.parent is not None
                del node.parent.children[node.block]
                if node.parent.parent is None and not node.parent.children:
                    del self._roots[node.parent.salt]
        if not path:
            self._paths.pop(slot, None)

    def match(
        self, tokens: tuple[int, ...], salt: str = "", counts: Callable[[int], bool] = lambda _slot: True
    ) -> tuple[int, list[int]]:
        """The longest known beginning of `tokens` under `salt` in blocks, and the slots that hold it (none of nothing).

        Only slots that `counts` says yes to are looked at.

        The last token is left out: it has to be computed for there to be something to sample from.
        """
        node, blocks, holders = self._roots.get(salt), 0, list[int]()
        for start in range(0, len(tokens) - BLOCK_TOKENS, BLOCK_TOKENS):
            node = None if node is None else node.children.get(tokens[start : start + BLOCK_TOKENS])
            if node is None or not (counting := [slot for slot in node.slots if counts(slot)]):
                break
            blocks, holders = blocks + 1, counting
        return blocks, holders
