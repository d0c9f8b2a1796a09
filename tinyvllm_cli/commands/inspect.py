"""`tinyvllm inspect`: what is in a checkpoint and what it will need. Reads headers and JSON only, never the weights."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tinyvllm_cli.checkpoint.config import ModelConfig, scan_config
from tinyvllm_cli.checkpoint.faults import Fault, as_error
from tinyvllm_cli.checkpoint.header import TensorInfo
from tinyvllm_cli.checkpoint.index import Checkpoint, find_weights, scan_checkpoint
from tinyvllm_cli.checkpoint.json_file import read_json
from tinyvllm_cli.checkpoint.names import LM_HEAD, WeightMap, scan_weights, weights_layout
from tinyvllm_cli.errors import ExitCode, UserError
from tinyvllm_cli.memory.plan import ITEMSIZE, BufferPlan, KVPlan, Limits, plan_buffers, plan_kv_cache

UNLIMITED = 2**63


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """What the command line says.

    Attributes:
        path: folder, .safetensors file or index.json.
        dtype: of weights, activations and KV cache; "auto" is what the weights are stored in.
        max_num_seqs, max_batched_tokens, block_size: as for `generate`.
        max_model_len: as for `generate`; None is what the model was made for.
        memory: device memory in bytes that weights, buffers and KV cache share; None sizes the cache for all sequences.
    """

    path: Path
    dtype: str = "auto"
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    max_model_len: int | None = None
    block_size: int = 16
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over tensors: number, elements (a tied matrix counts once) and bytes; in `by_dtype` for each dtype."""

    num_tensors: int
    num_parameters: int
    num_bytes: int
    by_dtype: dict[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What running the model takes: dtype of all of it, limits, bytes of weights, buffers, KV cache (None: no room)."""

    dtype: str
    limits: Limits
    weights_bytes: int
    buffers: BufferPlan
    kv: KVPlan | None
    memory: int | None

    @property
    def kv_bytes_per_token(self) -> int:
        return self.kv.block_bytes // self.kv.block_size if self.kv else 0


@dataclass(slots=True)
class InspectResult:
    """What was found.

    Attributes:
        path: as given.
        checkpoint: files and tensors, as far as they could be read.
        config: None when there is none (a lone file), or when it is faulty or unsupported.
        tied: whether logits are made with the embedding matrix; None without a config.
        has_chat_template: whether the model has one; None for a lone file.
        totals, plan: None for plan when the model cannot be run.
        faults: what is wrong with the checkpoint.
        unsupported: why tinyvllm cannot run it, though it may be right.
        warnings: what else the user should know.
    """

    path: Path
    checkpoint: Checkpoint
    totals: Totals
    config: ModelConfig | None = None
    tied: bool | None = None
    has_chat_template: bool | None = None
    plan: MemoryPlan | None = None
    faults: list[Fault] = field(default_factory=list)
    unsupported: list[Fault] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.ERROR if self.faults else ExitCode.OK

    @property
    def error(self) -> UserError | None:
        """All faults as one error for people, None when there are none."""
        return as_error(self.faults) if self.faults else None

    def to_json(self) -> dict[str, Any]:
        """The object that `inspect --json` writes."""
        files = self.checkpoint.files
        return {
            "path": str(self.path),
            "tensors": [_tensor_json(tensor) for tensor in self.checkpoint.tensors.values()],
            "totals": {
                "num_tensors": self.totals.num_tensors,
                "num_parameters": self.totals.num_parameters,
                "num_bytes": self.totals.num_bytes,
                "by_dtype": {
                    dtype: {"num_tensors": count, "num_parameters": elements, "num_bytes": nbytes}
                    for dtype, (count, elements, nbytes) in self.totals.by_dtype.items()
                },
            },
            "files": [
                {
                    "file": header.path.name,
                    "header_bytes": header.header_bytes,
                    "data_bytes": header.data_bytes,
                    "num_tensors": len(header.tensors),
                    "metadata": dict(header.metadata),
                }
                for header in files
            ],
            "ignored_files": [path.name for path in self.checkpoint.ignored_files],
            "index": self.checkpoint.index.name if self.checkpoint.index else None,
            "config": self._config_json(),
            **(_plan_json(self.plan) if self.plan else {"weights": None, "buffers": [], "kv_cache": None}),
            "faults": [_fault_json(fault) for fault in self.faults],
            "unsupported": [_fault_json(fault) for fault in self.unsupported],
            "warnings": self.warnings,
        }

    def _config_json(self) -> dict[str, Any] | None:
        if self.config is None:
            return None
        content = asdict(self.config) | {"eos_token_ids": list(self.config.eos_token_ids)}
        return content | {"tied": self.tied, "has_chat_template": self.has_chat_template}


def run(options: InspectOptions) -> InspectResult:
    """Looks at everything and collects all faults. UserError when there is nothing at the path."""
    checkpoint, faults = scan_checkpoint(options.path)
    result = InspectResult(options.path, checkpoint, _totals(checkpoint, None))
    headers_are_right = not faults
    weight_map = None
    if _is_whole_model(options.path, checkpoint):
        result.config, more = scan_config(checkpoint.folder)
        faults += more
        result.has_chat_template = _has_chat_template(checkpoint.folder)
        if result.config and headers_are_right:
            weight_map, more = scan_weights(result.config, checkpoint, probe=True)
            faults += more
    result.faults = [fault for fault in faults if not fault.unsupported]
    result.unsupported = [fault for fault in faults if fault.unsupported]
    if checkpoint.ignored_files:
        names = ", ".join(path.name for path in checkpoint.ignored_files)
        result.warnings.append(f"not part of the model and ignored: {names}")
    if result.config is not None:
        result.tied = weight_map.tied if weight_map else result.config.tie_word_embeddings
    if result.config is not None and weight_map is not None:
        result.totals = _totals(checkpoint, weight_map)
        result.warnings += weight_map.warnings
        result.plan = _plan(result.config, weight_map, options, result.warnings)
    return result


def _is_whole_model(path: Path, checkpoint: Checkpoint) -> bool:
    """Whether `path` stands for a model with its config.json, and not for a lone file or one shard of several."""
    if os.path.isdir(path):
        return True
    return os.path.exists(checkpoint.folder / "config.json") and find_weights(checkpoint.folder) == path


def _totals(checkpoint: Checkpoint, weight_map: WeightMap | None) -> Totals:
    tensors: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        is_copy = weight_map is not None and weight_map.tied and tensor.name == LM_HEAD
        tensors[tensor.dtype] += 1
        elements[tensor.dtype] += 0 if is_copy else tensor.num_elements
        nbytes[tensor.dtype] += tensor.nbytes
    by_dtype = {dtype: (tensors[dtype], elements[dtype], nbytes[dtype]) for dtype, _ in nbytes.most_common()}
    return Totals(tensors.total(), elements.total(), nbytes.total(), by_dtype)


def _plan(config: ModelConfig, weight_map: WeightMap, options: InspectOptions, warnings: list[str]) -> MemoryPlan:
    dtype = weight_map.dtype if options.dtype == "auto" else options.dtype
    if dtype not in ITEMSIZE:
        raise UserError(f"unknown dtype {dtype!r}", where="--dtype", exit_code=ExitCode.USAGE)
    max_model_len = options.max_model_len or config.max_position_embeddings
    limits = Limits(options.max_num_seqs, options.max_batched_tokens, max_model_len, options.block_size)
    weights_bytes = weights_layout(config, ITEMSIZE[dtype], weight_map.tied)[1]
    buffers = plan_buffers(config, limits, dtype)
    room = UNLIMITED if options.memory is None else options.memory - weights_bytes - buffers.total_bytes
    try:
        kv: KVPlan | None = plan_kv_cache(config, limits, dtype, room)
    except UserError as error:
        kv = None
        warnings.append(str(error))
    return MemoryPlan(dtype, limits, weights_bytes, buffers, kv, options.memory)


def _has_chat_template(folder: Path) -> bool:
    if any(os.path.exists(folder / name) for name in ("chat_template.jinja", "chat_template.json")):
        return True
    path = folder / "tokenizer_config.json"
    return os.path.exists(path) and bool(read_json(path)[0].get("chat_template"))


def _tensor_json(tensor: TensorInfo) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "data_offsets": [tensor.begin, tensor.end],
        "file": tensor.file.name,
    }


def _fault_json(fault: Fault) -> dict[str, str]:
    return {"where": fault.where, "what": fault.what, "fix": fault.fix}


def _plan_json(plan: MemoryPlan) -> dict[str, Any]:
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
            "block_size": plan.kv.block_size,
            "block_bytes": plan.kv.block_bytes,
            "bytes_per_token": plan.kv_bytes_per_token,
            "num_blocks": plan.kv.num_blocks,
            "num_tokens": plan.kv.num_tokens,
            "num_bytes": plan.kv.total_bytes,
            "blocks_per_seq": plan.limits.blocks_per_seq,
            "full_length_seqs": plan.kv.num_blocks // plan.limits.blocks_per_seq,
        }
    return {
        "weights": {"num_bytes": plan.weights_bytes, "dtype": plan.dtype},
        "limits": asdict(plan.limits),
        "memory": plan.memory,
        "buffers": buffers,
        "buffers_bytes": plan.buffers.total_bytes,
        "kv_cache": kv_cache,
    }
