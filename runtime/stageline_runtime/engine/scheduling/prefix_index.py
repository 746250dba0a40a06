"""Which slots hold the beginning of which token sequences: what makes a prefix reusable. Pure.

A tree of token blocks: a path from its root is a sequence of whole blocks, and every node names the slots whose content
begins with that path. Keys and values of a block follow from all tokens up to its end and from nothing else, so the
path itself is the key: two sequences never share a node by chance. Every node names at least one slot.
"""

from dataclasses import dataclass, field

from stageline_runtime.plan_bus.kv_blocks import BLOCK_TOKENS

Block = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Node:
    parent: "_Node | None"
    block: Block
    children: dict[Block, "_Node"] = field(default_factory=dict)
    slots: dict[int, None] = field(default_factory=dict)
    """In the order in which they came to hold it."""


class PrefixIndex:
    """Content of slots, in whole blocks."""

    def __init__(self) -> None:
        self._root = _Node(None, ())
        self._paths: dict[int, list[_Node]] = {}

    def num_blocks(self, slot: int) -> int:
        """Blocks that `slot` is known to hold."""
        return len(self._paths.get(slot, ()))

    def extend(self, slot: int, block: Block) -> None:
        """`slot` holds one block more."""
        assert len(block) == BLOCK_TOKENS, block
        path = self._paths.setdefault(slot, [])
        parent = path[-1] if path else self._root
        node = parent.children.get(block)
        if node is None:
            node = parent.children[block] = _Node(parent, block)
        node.slots[slot] = None
        path.append(node)

    def truncate(self, slot: int, num_blocks: int) -> None:
        """`slot` holds no more than its first `num_blocks` blocks."""
        path = self._paths.get(slot, [])
        while len(path) > num_blocks:
            node = path.pop()
            del node.slots[slot]
            if not node.slots:
                assert node.parent is not None
                del node.parent.children[node.block]
        if not path:
            self._paths.pop(slot, None)

    def match(self, tokens: tuple[int, ...]) -> tuple[int, list[int]]:
        """The longest known beginning of `tokens` in blocks, and the slots that hold it (none of nothing).

        The last token is left out: it has to be computed for there to be something to sample from.
        """
        node, blocks = self._root, 0
        for start in range(0, len(tokens) - BLOCK_TOKENS, BLOCK_TOKENS):
            child = node.children.get(tokens[start : start + BLOCK_TOKENS])
            if child is None:
                break
            node, blocks = child, blocks + 1
        return blocks, list(node.slots)
