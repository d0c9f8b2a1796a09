"""How the memory of a device is shared out: weights, buffers, KV cache, and what must be left alone.

The one source of truth for `inspect`, which predicts, and for LLM, which allocates.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyvllm_cli.errors import UserError
from tinyvllm_cli.memory.plan import (
    BufferPlan,
    KVPlan,
    Limits,
    kv_block_bytes,
    plan_buffers,
    plan_kv_cache,
)

if TYPE_CHECKING:
    from tinyvllm_cli.checkpoint.config import ModelConfig

CUDA_RESERVE = 512 * 2**20
"""Device memory left alone for CUDA graphs, cuBLAS workspaces and the allocator's own needs, in bytes."""
CUDA_CONTEXT = 600 * 2**20
"""What a process takes of the device before it allocates anything: context and kernels; an estimate, in bytes."""
CPU_KV_CACHE = 4 * 2**30
"""The KV cache's memory on the CPU unless asked otherwise, in bytes; pages that no token reaches are never touched."""
MEMORY_FRACTION = 0.9
"""Share of the device's memory that is used unless asked otherwise."""
UNLIMITED = 2**63


@dataclass(frozen=True, slots=True)
class Device:
    """What the model runs on.

    Attributes:
        name: for people.
        cuda: a GPU, not the CPU.
        total_bytes, free_bytes: its memory, and what of it nobody uses now; None: without limit.
    """

    name: str
    cuda: bool
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What running a model takes of a device.

    Attributes:
        device, dtype, limits, memory_fraction: what it was made for; dtype of weights, activations and KV cache.
        weights_bytes: one arena of all weights.
        buffers: one arena of all activation buffers.
        kv: the KV cache; None when there is no room for it, and `obstacle` says why.
        reserve_bytes: left alone for graphs and libraries, and what the process takes before it allocates anything.
        largest_context: tokens of the longest sequence that could run alone under the other limits; 0: none could.
    """

    device: Device
    dtype: str
    limits: Limits
    memory_fraction: float
    weights_bytes: int
    buffers: BufferPlan
    kv: KVPlan | None
    obstacle: str
    context_bytes: int
    reserve_bytes: int
    largest_context: int
    kv_bytes_per_token: int

    @property
    def allocated_bytes(self) -> int:
        """What torch will have reserved on the device, but for graphs and libraries."""
        return self.weights_bytes + self.buffers.total_bytes + (self.kv.total_bytes if self.kv else 0)

    @property
    def full_length_seqs(self) -> int:
        """How many sequences of max_model_len tokens run at once."""
        return self.kv.num_blocks // self.limits.blocks_per_seq if self.kv else 0


def pick_dtype(stored: str, cuda: bool) -> str:
    """The dtype to run in when none is asked for: float32 on the CPU; on CUDA the checkpoint's, if 16 bits wide."""
    if not cuda:
        return "float32"
    return stored if stored in ("bfloat16", "float16") else "bfloat16"


def cuda_kv_bytes(free: int, total: int, memory_fraction: float, buffers_bytes: int) -> int:
    """What the KV cache may take of a GPU whose weights are loaded and whose buffers are still to come, in bytes."""
    _check_fraction(memory_fraction)
    return int(free - (1 - memory_fraction) * total) - buffers_bytes - CUDA_RESERVE


def cpu_kv_bytes(available: int, memory_fraction: float) -> int:
    """What the KV cache may take of the host's memory once weights are loaded, in bytes."""
    _check_fraction(memory_fraction)
    return min(CPU_KV_CACHE, int(available * memory_fraction) // 2)


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan_memory(
    config: ModelConfig,
    limits: Limits,
    dtype: str,
    device: Device,
    weights_bytes: int,
    *,
    memory_fraction: float = MEMORY_FRACTION,
    kv_cache_memory: int | None = None,
) -> MemoryPlan:
    """Predicts what LLM will allocate; kv_cache_memory: as for LLM. UserError for a fraction out of range."""
    buffers = plan_buffers(config, limits, dtype)

    def room(buffers_bytes: int) -> int:
        if kv_cache_memory is not None:
            return kv_cache_memory
        if device.free_bytes is None or device.total_bytes is None:
            return UNLIMITED
        free = device.free_bytes - weights_bytes
        if device.cuda:
            return cuda_kv_bytes(free - CUDA_CONTEXT, device.total_bytes, memory_fraction, buffers_bytes)
        return cpu_kv_bytes(free, memory_fraction)

    def capacity(length: int) -> int:
        """Tokens that fit the cache when sequences may have `length`, whose tables take of the memory, too."""
        single = Limits(limits.max_num_seqs, limits.max_batched_tokens, length, limits.block_size)
        free = room(plan_buffers(config, single, dtype).total_bytes)
        return min(max(free, 0) // block_bytes * limits.block_size, longest)

    block_bytes = kv_block_bytes(config, limits.block_size, dtype)
    try:
        kv, obstacle = plan_kv_cache(config, limits, dtype, room(buffers.total_bytes)), ""
    except UserError as error:
        kv, obstacle = None, str(error)
    longest = config.max_position_embeddings
    shortest = capacity(longest)  # so many fit in any case
    high = longest if shortest == longest else capacity(max(shortest, 1))  # and no more than these
    while shortest < high:
        middle = (shortest + high + 1) // 2
        shortest, high = (middle, high) if capacity(middle) >= middle else (shortest, middle - 1)
    return MemoryPlan(
        device=device,
        dtype=dtype,
        limits=limits,
        memory_fraction=memory_fraction,
        weights_bytes=weights_bytes,
        buffers=buffers,
        kv=kv,
        obstacle=obstacle,
        context_bytes=CUDA_CONTEXT if device.cuda else 0,
        reserve_bytes=CUDA_RESERVE if device.cuda else 0,
        largest_context=shortest,
        kv_bytes_per_token=block_bytes // limits.block_size,
    )


def _check_fraction(memory_fraction: float) -> None:
    if not 0 < memory_fraction <= 1:
        raise UserError(
            f"{memory_fraction} is out of range", where="--memory-fraction", fix="Give a number above 0, at most 1."
        )
