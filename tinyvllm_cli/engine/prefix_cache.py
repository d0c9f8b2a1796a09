"""PrefixCache: finds the blocks that hold the K and V of a sequence's first tokens, whoever has computed them.

K and V of a token depend on all tokens before it. So full blocks form trees: a block is a child of the block before it,
and a beginning of tokens is a path from a root. Each place in a tree has a number, its node, that is given once and
stands for the same tokens for ever; the name of a block in the pool is (node before it, its token ids). Looking up a
name compares the token ids themselves, so that nothing depends on hashes being free of collisions. When a block is
forgotten, those behind it may stay: they cannot be reached any more, and are forgotten in their turn.

As automatic prefix caching in vLLM (Kwon et al. 2023, PagedAttention) and RadixAttention in SGLang (Zheng et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tinyvllm_cli.engine.blocks import BlockPool, Int32Array

if TYPE_CHECKING:
    from tinyvllm_cli.engine.sequence import Sequence


@dataclass(slots=True)
class Chain:
    """The path of a sequence: its first `length` blocks lead from `root` to `node`."""

    root: int
    node: int
    length: int


class Beginning(NamedTuple):
    """Blocks that hold the first tokens of a sequence, int32 [count], and the node that they lead to."""

    blocks: Int32Array
    node: int


class PrefixCache:
    """The names of the full blocks of a pool.

    Args:
        pool: whose blocks they are.
        for_all: all sequences share one tree; else relatives have a tree of their own, and others share nothing.
    """

    def __init__(self, pool: BlockPool, for_all: bool) -> None:
        self._pool = pool
        self._nodes = [0] * pool.num_blocks  # where the named blocks lead to
        self._last_node = 0
        self._common_root = self._new_node() if for_all else None

    def join(self, sequence: Sequence, relative: Sequence | None) -> None:
        """Decides with whom a new sequence shares its beginning."""
        root = self._common_root
        if root is None and relative is not None:
            if relative.chain is None:
                root = self._new_node()
                relative.chain = Chain(root, root, 0)
            root = relative.chain.root
        sequence.chain = None if root is None else Chain(root, root, 0)

    def find(self, sequence: Sequence) -> Beginning:
        """The longest beginning of a sequence's `prefix` that is there; at least its last token is left out.

        For one token must be computed: there is nothing to sample from otherwise.
        """
        blocks: list[int] = []
        node = 0
        if sequence.chain is not None and sequence.prefix is not None:
            node, size = sequence.chain.root, 4 * self._pool.block_size
            data = sequence.prefix.tobytes()
            for end in range(size, len(data), size):
                block = self._pool.find((node, data[end - size : end]))
                if block is None:
                    break
                blocks.append(block)
                node = self._nodes[block]
        return Beginning(np.array(blocks, dtype=np.int32), node)

    def start(self, sequence: Sequence, beginning: Beginning) -> None:
        """The sequence is admitted, with these as its first blocks."""
        if sequence.chain is not None:
            sequence.chain.node, sequence.chain.length = beginning.node, len(beginning.blocks)

    def add(self, sequence: Sequence, num_stored: int, blocks: Int32Array) -> None:
        """Adds the full blocks of a running sequence's first `num_stored` tokens, as far as these are known.

        The steps that store them must be planned: whoever finds a block reads it in the last of them or later, and in
        each layer a step stores all K and V before it reads any. Nobody writes to such a block any more.

        Args:
            sequence: in its prefill or behind it.
            num_stored: tokens.
            blocks: all that it has. Where the tree has another one for the same tokens, that one stays.
        """
        chain, size = sequence.chain, self._pool.block_size
        if chain is None or num_stored // size <= chain.length:
            return
        if sequence.prefix is not None:
            tokens = sequence.prefix[chain.length * size : num_stored]
        else:
            known = sequence.prompt_token_ids + sequence.output_token_ids
            tokens = np.array(known[chain.length * size : num_stored], dtype=np.int32)
        data, size = tokens.tobytes(), 4 * size
        for end in range(size, len(data) + 1, size):
            name = chain.node, data[end - size : end]
            block = self._pool.find(name)
            if block is None:
                block = int(blocks[chain.length])
                self._pool.name(block, name)
                self._nodes[block] = self._new_node()
            chain.node = self._nodes[block]
            chain.length += 1

    def _new_node(self) -> int:
        self._last_node += 1
        return self._last_node
