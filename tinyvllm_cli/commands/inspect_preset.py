"""`inspect --preset tiny-vllm`: the buffers of the engine that this one is measured against, and ours beside them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tinyvllm_cli.bench.shapes import SHAPES
from tinyvllm_cli.checkpoint.names import weights_layout
from tinyvllm_cli.commands.inspect_json import SCHEMA, memory_json
from tinyvllm_cli.memory import tiny_vllm
from tinyvllm_cli.memory.budget import Device, MemoryPlan, plan_memory
from tinyvllm_cli.memory.plan import ITEMSIZE
from tinyvllm_cli.memory.tiny_vllm import PresetBuffer


@dataclass(frozen=True, slots=True)
class PresetResult:
    """Its buffers and KV cache, and our plan for the same model under the same limits."""

    buffers: tuple[PresetBuffer, ...]
    kv_cache_bytes: int
    kv_block_bytes: int
    ours: MemoryPlan

    @property
    def device_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers if not buffer.on_host)

    @property
    def host_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers if buffer.on_host)

    def to_json(self) -> dict[str, Any]:
        """The object that `inspect --preset tiny-vllm --json` writes."""
        buffers = [
            {"name": b.name, "bytes": b.nbytes, "formula": b.formula, "roles": list(b.roles), "on_host": b.on_host}
            for b in self.buffers
        ]
        return {
            "schema": SCHEMA,
            "preset": "tiny-vllm",
            "buffers": buffers,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "kv_cache": {"bytes": self.kv_cache_bytes, "block_bytes": self.kv_block_bytes},
            "limits": asdict(self.ours.limits),
            "ours": memory_json(self.ours),
        }


def preset() -> PresetResult:
    """tiny-vllm's table, and ours for Llama 3.2 1B in bfloat16 under its limits."""
    config = SHAPES[tiny_vllm.SHAPE]
    weights_bytes = weights_layout(config, ITEMSIZE["bfloat16"])[1]
    ours = plan_memory(config, tiny_vllm.LIMITS, "bfloat16", Device("a GPU of any memory", True), weights_bytes)
    return PresetResult(tiny_vllm.buffers(), tiny_vllm.KV_CACHE_BYTES, tiny_vllm.KV_BLOCK_BYTES, ours)
