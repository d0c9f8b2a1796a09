"""The JSON of `inspect`, as inspect.schema.json describes it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tinyvllm_cli.checkpoint.faults import Fault
from tinyvllm_cli.checkpoint.header import Header, TensorInfo
from tinyvllm_cli.checkpoint.parts import PARTS, layer_of, part_of
from tinyvllm_cli.commands.inspect import InspectResult
from tinyvllm_cli.memory.budget import MemoryPlan

SCHEMA = "tinyvllm-inspect-1"
"""Named in every object; the number grows when a key changes its meaning or goes away, not when one is added."""


def as_json(result: InspectResult) -> dict[str, Any]:
    """The object that `inspect --json` writes."""
    checkpoint = result.checkpoint
    tensors = checkpoint.tensors.values() if result.listed is None else result.listed
    memory = memory_json(result.plan) if result.plan else {"buffers": [], "kv_cache": None}
    buffers, kv_cache = memory.pop("buffers"), memory.pop("kv_cache")
    return {
        "schema": SCHEMA,
        "path": result.label,
        "runs_on": result.runs_on,
        "totals": {
            **result.totals.all._asdict(),
            "by_dtype": {dtype: count._asdict() for dtype, count in result.totals.by_dtype.items()},
            "by_part": {part: count._asdict() for part, count in result.totals.by_part.items()},
        },
        "config": _config(result),
        "memory": memory or None,
        "buffers": buffers,
        "kv_cache": kv_cache,
        "files": [_file(header) for header in checkpoint.files],
        "ignored_files": [path.name for path in checkpoint.ignored_files],
        "index": checkpoint.index.name if checkpoint.index else None,
        "tensors": [_tensor(tensor) | _data(result, tensor.name) for tensor in tensors],
        "diff": _diff(result),
        "faults": [_fault(fault) for fault in result.faults],
        "unsupported": [_fault(fault) for fault in result.unsupported],
        "warnings": result.warnings,
    }


def memory_json(plan: MemoryPlan) -> dict[str, Any]:
    """A memory plan, the buffers with their formulas, lifetimes and places among it."""
    buffers = [
        {
            "name": buffer.name,
            "bytes": buffer.nbytes,
            "formula": buffer.formula,
            "role": buffer.role,
            "shape": list(buffer.shape),
            "dtype": buffer.dtype,
            "offset": buffer.offset,
            "live": [list(interval) for interval in buffer.live],
            "shares_memory_with": list(buffer.alias_of),
        }
        for buffer in plan.buffers.buffers
    ]
    kv_cache = None
    if plan.kv:
        kv_cache = {
            "bytes": plan.kv.total_bytes,
            "block_size": plan.kv.block_size,
            "block_bytes": plan.kv.block_bytes,
            "num_blocks": plan.kv.num_blocks,
            "num_tokens": plan.kv.num_tokens,
        }
    return {
        "device": asdict(plan.device),
        "dtype": plan.dtype,
        "memory_fraction": plan.memory_fraction,
        "limits": asdict(plan.limits),
        "weights_bytes": plan.weights_bytes,
        "buffers_bytes": plan.buffers.total_bytes,
        "buffers": buffers,
        "kv_cache": kv_cache,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "blocks_per_seq": plan.limits.blocks_per_seq,
        "full_length_seqs": plan.full_length_seqs,
        "largest_context": plan.largest_context,
        "allocated_bytes": plan.allocated_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "context_bytes": plan.context_bytes,
    }


def _config(result: InspectResult) -> dict[str, Any] | None:
    if result.config is None:
        return None
    content = asdict(result.config) | {"eos_token_ids": list(result.config.eos_token_ids)}
    return content | {"tied": result.tied, "has_chat_template": result.has_chat_template}


def _file(header: Header) -> dict[str, Any]:
    layers = {layer for tensor in header.tensors if (layer := layer_of(tensor.name)) is not None}
    parts = {part_of(tensor.name) for tensor in header.tensors}
    return {
        "file": header.path.name,
        "header_bytes": header.header_bytes,
        "data_bytes": header.data_bytes,
        "data_end": max((tensor.end for tensor in header.tensors), default=0),
        "num_tensors": len(header.tensors),
        "layers": sorted(layers),
        "parts": [part for part in PARTS if part in parts],
        "metadata": dict(header.metadata),
    }


def _tensor(tensor: TensorInfo) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "data_offsets": [tensor.begin, tensor.end],
        "file": tensor.file.name,
        "part": part_of(tensor.name),
    }


def _data(result: InspectResult, name: str) -> dict[str, Any]:
    data = result.data.get(name) if result.data else None
    return {} if data is None else {"data": asdict(data) | {"histogram": list(data.histogram)}}


def _diff(result: InspectResult) -> dict[str, Any] | None:
    diff = result.diff
    if diff is None:
        return None
    changed = [
        {
            "name": change.old.name,
            "old": {"dtype": change.old.dtype, "shape": list(change.old.shape)},
            "new": {"dtype": change.new.dtype, "shape": list(change.new.shape)},
            "num_differing": change.num_differing,
        }
        for change in diff.changed
    ]
    return {
        "other": diff.other,
        "content_checked": diff.content_checked,
        "added": [_tensor(tensor) for tensor in diff.added],
        "removed": [_tensor(tensor) for tensor in diff.removed],
        "changed": changed,
        "num_same": diff.num_same,
    }


def _fault(fault: Fault) -> dict[str, str]:
    return {"where": fault.where, "what": fault.what, "fix": fault.fix}
