"""BlockPool: which blocks of the key/value cache are free, and how many owners the others have."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each, with reference counts and a stack of free blocks.

    A freed block may be handed out at once, although launched steps may still read or write it: the device works in
    the order of launches, so the next owner's writes come after them.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # the first num_free entries; the last goes next
        self._owners = np.zeros(num_blocks, dtype=np.int32)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> Int32Array:
        """Takes `count` free blocks, int32 [count], with one owner each. The caller has looked at `num_free`."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count][::-1].copy()
        self._owners[blocks] = 1
        return blocks

    def share(self, blocks: Int32Array) -> None:
        """Adds an owner to each of `blocks` (distinct, all in use)."""
        self._require_owned(blocks)
        self._owners[blocks] += 1

    def free(self, blocks: Int32Array) -> None:
        """Takes an owner from each of `blocks` (distinct, all in use); those without an owner are free again."""
        self._require_owned(blocks)
        self._owners[blocks] -= 1
        released = blocks[self._owners[blocks] == 0]
        self._free[self.num_free : self.num_free + len(released)] = released[::-1]
        self.num_free += len(released)

    def check(self) -> None:
        """Raises RuntimeError unless every block is either in use or in the free stack, exactly once."""
        free = np.bincount(self._free[: self.num_free], minlength=self.num_blocks)
        if not (0 <= self.num_free <= self.num_blocks and np.array_equal(free, self._owners == 0)):
            raise RuntimeError("the free blocks and the reference counts of the block pool disagree")

    def _require_owned(self, blocks: Int32Array) -> None:
        if len(blocks) and self._owners[blocks].min() < 1:
            raise RuntimeError("a free block was freed or shared")
