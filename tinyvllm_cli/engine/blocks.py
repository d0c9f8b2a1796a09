"""BlockPool: which blocks of the key/value cache are free, how many owners the others have, and what full ones hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each, with reference counts. A block is in one of three states:

        owned   by one sequence or several
        kept    without an owner, but it has a name by which its content can be found and owned again
        empty   without an owner and without a name

    Kept blocks are as free as empty ones, which are handed out first. After them the one that was kept for longest
    loses its name.

    A freed block may be handed out at once, although launched steps may still read or write it: the device works in
    the order of launches, so the next owner's writes come after them.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_empty = num_blocks
        # The first _num_empty entries are the empty blocks; the last of them goes next.
        self._empty = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._owners = np.zeros(num_blocks, dtype=np.int32)
        self._kept: OrderedDict[int, None] = OrderedDict()  # the first goes next
        self._names: list[Hashable] = [None] * num_blocks
        self._named: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return self._num_empty + len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def num_unowned(self, blocks: Int32Array) -> int:
        """How many of `blocks` (distinct) have no owner, so that sharing them takes from the free ones."""
        return int(np.count_nonzero(self._owners[blocks] == 0)) if len(blocks) else 0

    def allocate(self, count: int) -> Int32Array:
        """Takes `count` free blocks, int32 [count], with one owner each. The caller has looked at `num_free`."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        for _ in range(count - self._num_empty):
            self._forget_oldest()
        self._num_empty -= count
        blocks = self._empty[self._num_empty : self._num_empty + count][::-1].copy()
        self._owners[blocks] = 1
        return blocks

    def share(self, blocks: Int32Array) -> None:
        """Adds an owner to each of `blocks` (distinct, owned or kept)."""
        if not len(blocks):
            return  # as without a common beginning
        kept = blocks[self._owners[blocks] == 0].tolist()
        if any(block not in self._kept for block in kept):
            raise RuntimeError("an empty block was shared")
        for block in kept:
            del self._kept[block]
        self._owners[blocks] += 1

    def free(self, blocks: Int32Array) -> None:
        """Takes an owner from each of `blocks` (distinct, owned, in their order in a sequence).

        Those that have no owner left are free. The end of a sequence is forgotten before its beginning, without which
        it is of no use.
        """
        left = self._owners[blocks] - 1
        if len(blocks) and left.min() < 0:
            raise RuntimeError("a free block was freed")
        self._owners[blocks] = left
        released = blocks[left == 0][::-1]
        if self._named:
            names, kept = self._names, self._kept
            empty = [block for block in released.tolist() if names[block] is None]
            kept.update((block, None) for block in released.tolist() if names[block] is not None)
            released = np.array(empty, dtype=np.int32)
        self._empty[self._num_empty : self._num_empty + len(released)] = released
        self._num_empty += len(released)

    def name(self, block: int, name: Hashable) -> None:
        """Lets an owned block, which will not be written any more, be found by what it holds. `name` is new."""
        if self._owners[block] < 1 or self._names[block] is not None or name in self._named:
            raise RuntimeError(f"block {block} cannot be named")
        self._names[block] = name
        self._named[name] = block

    def find(self, name: Hashable) -> int | None:
        """The block of that name, owned or kept."""
        return self._named.get(name)

    def _forget_oldest(self) -> None:
        block, _ = self._kept.popitem(last=False)
        del self._named[self._names[block]]
        self._names[block] = None
        self._empty[self._num_empty] = block
        self._num_empty += 1

    def check(self) -> None:
        """Raises RuntimeError unless every block is owned, kept or empty, exactly once, and found by its own name."""
        empty = np.bincount(self._empty[: self._num_empty], minlength=self.num_blocks)
        kept = np.zeros_like(empty)
        kept[list(self._kept)] = 1
        named = np.array([name is not None for name in self._names], dtype=bool)
        if not (
            0 <= self._num_empty <= self.num_blocks
            and np.array_equal(empty + kept, self._owners == 0)
            and not (kept > named).any()
            and not (empty * named).any()
        ):
            raise RuntimeError("the free blocks and the reference counts of the block pool disagree")
        if len(self._named) != named.sum() or any(self._names[block] != name for name, block in self._named.items()):
            raise RuntimeError("the names of the block pool's blocks disagree")
