"""The blocks of one KV cache: which are referenced, which are free, and what the others still hold. Pure.

A block full of known tokens is *cached*: it can be found by the whole sequence of tokens up to its end, and any
number of requests may reference it. A block's keys and values depend only on these tokens, so the path of token
blocks itself is the key, and two sequences never share a block by chance. Each salt has a tree of its own, so that
a client without the salt can't infer from an answer's latency what others have asked.

An unreferenced cached block stays usable until its space is needed; the longest unused is evicted first. A request
that references a block references all before it and releases them from the last to the first, so a block is never
evicted before those that follow it. Adjacent blocks in memory are read as one, so a sequence gets neighbours where
it can.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from stageline_runtime.plan_bus.step_plan import BLOCK_TOKENS

MAX_NAMES = 8
"""Of beginnings of prompts that end in one block: a block that many prompts share forgets the oldest ones."""
Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A block with known tokens, as a node of the tree."""

    number: int
    tokens: Tokens
    salt: str
    siblings: dict[Tokens, "CachedBlock"]
    """Where it is found."""
    followers: dict[Tokens, "CachedBlock"] = field(default_factory=dict)
    names: dict[str, None] = field(default_factory=dict)
    """Of the beginnings of prompts that end in it, the oldest first."""


class BlockPool:
    """Blocks `0..num_blocks-1`. Invariant: each is referenced, or cached and unused, or free."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._is_free = bytearray(b"\1" * num_blocks)
        self._num_free = num_blocks
        self._cached: dict[int, CachedBlock] = {}
        """By number, referenced or not."""
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Unreferenced cached blocks, the longest unused first."""
        self._roots: dict[str, dict[Tokens, CachedBlock]] = {}
        self._names: Counter[str] = Counter()

    @property
    def num_available(self) -> int:
        """Blocks that can be had without taking them from a holder."""
        return self._num_free + len(self._unused)

    @property
    def num_unused(self) -> int:
        """Cached blocks without a reference."""
        return len(self._unused)

    def references(self, block: int) -> int:
        return self._references[block]

    def names(self) -> set[str]:
        """Of all beginnings of prompts that are cached up to their last whole block."""
        return set(self._names)

    def name(self, cached: CachedBlock, name: str) -> None:
        """A named prefix of a prompt ends in this block."""
        if name in cached.names:
            return
        if len(cached.names) == MAX_NAMES:
            self._forget_name(cached, next(iter(cached.names)))
        cached.names[name] = None
        self._names[name] += 1

    def make_room(self, num_blocks: int) -> None:
        """Ensure that this many blocks are free, by evicting unreferenced cached ones."""
        assert num_blocks <= self.num_available, f"{num_blocks} blocks of {self.num_available} that are available"
        while self._num_free < num_blocks:
            self._forget(self._unused.popitem(last=False)[0])

    def take(self, near: int) -> int:
        """Reference one more block, preferably the free one at or after `near`. Call `make_room` first."""
        block = self._is_free.find(1, near)
        if block < 0:
            block = self._is_free.index(1)
        self._is_free[block] = 0
        self._num_free -= 1
        self._references[block] = 1
        return block

    def reference(self, cached: CachedBlock) -> None:
        """One more request uses a cached block."""
        self._unused.pop(cached.number, None)
        self._references[cached.number] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Release a request's references to its blocks; the last of its positions must come first."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._cached:
                self._unused[block] = None
            else:
                self._free(block)

    def find(self, tokens: Tokens, salt: str) -> list[CachedBlock]:
        """The cached blocks of the longest known prefix of `tokens`, without the last token: it has to be computed
        so that there are logits to sample from."""
        found: list[CachedBlock] = []
        followers = self._roots.get(salt, {})
        for start in range(0, len(tokens) - BLOCK_TOKENS, BLOCK_TOKENS):
            cached = followers.get(tokens[start : start + BLOCK_TOKENS])
            if cached is None:
                break
            found.append(cached)
            followers = cached.followers
        return found

    def cache(self, block: int, tokens: Tokens, before: CachedBlock | None, salt: str) -> CachedBlock:
        """A referenced block is full of `tokens`, behind those of `before`. Where another block holds the same, that
        one is returned, and the caller is to use it instead.
        """
        assert len(tokens) == BLOCK_TOKENS, tokens
        siblings = self._roots.setdefault(salt, {}) if before is None else before.followers
        if (known := siblings.get(tokens)) is not None:
            return known
        cached = CachedBlock(block, tokens, salt, siblings)
        self._cached[block] = siblings[tokens] = cached
        return cached

    def _forget(self, block: int) -> None:
        """Free a cached block that is no longer among the unused."""
        cached = self._cached.pop(block)
        assert not cached.followers, f"block {block} would go before those that follow it"
        del cached.siblings[cached.tokens]
        if not self._roots[cached.salt]:
            del self._roots[cached.salt]
        self._free(block)
        for name in (*cached.names,):
            self._forget_name(cached, name)

    def _forget_name(self, cached: CachedBlock, name: str) -> None:
        del cached.names[name]
        self._names[name] -= 1
        if not self._names[name]:
            del self._names[name]

    def _free(self, block: int) -> None:
        self._is_free[block] = 1
        self._num_free += 1
