"""`tinyvllm inspect`: what is in a checkpoint and what it will need. Reads headers and JSON only."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tinyvllm_cli.checkpoint.config import ModelConfig, cuda_faults, scan_config
from tinyvllm_cli.checkpoint.faults import Fault, as_error, quote
from tinyvllm_cli.checkpoint.header import TensorInfo
from tinyvllm_cli.checkpoint.index import Checkpoint, find_weights, scan_checkpoint
from tinyvllm_cli.checkpoint.json_file import read_json
from tinyvllm_cli.checkpoint.names import EMBED, LM_HEAD, WeightMap, scan_weights, weights_layout
from tinyvllm_cli.checkpoint.parts import PARTS, part_of
from tinyvllm_cli.commands.inspect_data import check_data, compare_with
from tinyvllm_cli.commands.place import Place, Say, locate
from tinyvllm_cli.commands.settings import visible_gpus
from tinyvllm_cli.errors import ExitCode, UserError
from tinyvllm_cli.memory.budget import MEMORY_FRACTION, Device, MemoryPlan, available_memory, pick_dtype, plan_memory
from tinyvllm_cli.memory.gpu import find_gpu
from tinyvllm_cli.memory.plan import ITEMSIZE, default_limits

if TYPE_CHECKING:
    from tinyvllm_cli.checkpoint.data import TensorData
    from tinyvllm_cli.checkpoint.diff import Diff

SORTS: dict[str, Callable[[TensorInfo], Any]] = {
    "file": lambda tensor: (tensor.file, tensor.begin),
    "name": lambda tensor: [(len(w), w) if i % 2 else w for i, w in enumerate(re.split(r"0*([0-9]+)", tensor.name))],
    "size": lambda tensor: (-tensor.nbytes, tensor.name),
    "dtype": lambda tensor: (tensor.dtype, tensor.name),
    "shape": lambda tensor: (tensor.shape, tensor.name),
}
"""How tensors can be sorted: as they are stored, by name (numbers by value), largest first, ..."""


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """What the command line says.

    Attributes:
        path: folder, .safetensors file, index.json, or a model on the Hub such as owner/model.
        revision: branch, tag or commit on the Hub.
        tensors: a pattern such as *.mlp.*; sort: one of SORTS. Either lists single tensors, in place of folded layers.
        check_data: also read all values.
        diff: another checkpoint, to compare with.
        device, dtype, max_num_seqs, max_batched_tokens, max_model_len, block_size, memory_fraction, kv_cache_memory: as
            for LLM.
        memory: bytes of a GPU to plan for, in place of the one that is here.
    """

    path: Path
    revision: str | None = None
    tensors: str | None = None
    sort: str | None = None
    check_data: bool = False
    diff: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    memory: int | None = None
    memory_fraction: float = MEMORY_FRACTION
    kv_cache_memory: int | None = None


class Count(NamedTuple):
    """Number of tensors, of elements (a tied matrix counts once) and of stored bytes."""

    num_tensors: int
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over tensors: all of them, those of each dtype and of each part of the model, largest first."""

    all: Count
    by_dtype: dict[str, Count]
    by_part: dict[str, Count]


@dataclass(slots=True)
class InspectResult:
    """What was found.

    Attributes:
        label: the path as given, or the model on the Hub with its revision.
        checkpoint: files and tensors, as far as they could be read.
        listed: the tensors asked for, in order; None when all are wanted, folded.
        config: None when there is none (a lone file), or when it is faulty or unsupported.
        tied: whether logits are made with the embedding matrix; None without a config.
        has_chat_template: whether the model has one; None for a lone file.
        runs_on: "cpu" and "cuda": whether tinyvllm can run it there; None for a lone file.
        plan: None when the model cannot be run.
        data: statistics by tensor, if they were asked for.
        diff: what differs in another checkpoint, if that was asked for.
        faults: what is wrong with the checkpoint.
        unsupported: why tinyvllm cannot run it, though it may be right.
        warnings: what else the user should know.
    """

    label: str
    checkpoint: Checkpoint
    totals: Totals
    listed: list[TensorInfo] | None = None
    config: ModelConfig | None = None
    tied: bool | None = None
    has_chat_template: bool | None = None
    runs_on: dict[str, bool] | None = None
    plan: MemoryPlan | None = None
    data: dict[str, TensorData] | None = None
    diff: Diff | None = None
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


def run(options: InspectOptions, say: Say = lambda text: None) -> InspectResult:
    """Looks at everything and collects all faults; `say` is told what takes its time.

    UserError when there is nothing at the path, or when options are wrong.
    """
    with ExitStack() as stack:
        place = locate(options.path, options.revision, options.check_data, stack, say)
        result = _look(place, options, say)
        if options.diff is not None:
            other = locate(options.diff, None, options.check_data, stack, say)
            result.diff = compare_with(other, result.checkpoint, options.check_data and not result.faults, say)
        if place.is_shadow:
            place.relabel(result.faults)
            place.relabel(result.unsupported)
        if not result.checkpoint.tensors and not result.faults:
            result.warnings.append("there are no tensors in it")
        elif options.tensors is not None or options.sort is not None:
            result.listed = select(result.checkpoint.tensors.values(), options.tensors or "*", options.sort or "file")
            if not result.listed:
                result.warnings.append(f"no tensor is called {quote(options.tensors)}")
    return result


def select(tensors: Iterable[TensorInfo], pattern: str, sort: str) -> list[TensorInfo]:
    """The tensors whose names match a shell pattern, sorted by one of SORTS."""
    return sorted((tensor for tensor in tensors if fnmatchcase(tensor.name, pattern)), key=SORTS[sort])


def _look(place: Place, options: InspectOptions, say: Say) -> InspectResult:
    checkpoint, faults = scan_checkpoint(place.path)
    result = InspectResult(place.label, checkpoint, count(checkpoint))
    result.warnings += place.warnings
    headers_are_right = not faults
    weight_map = None
    if _is_whole_model(place.path, checkpoint):
        result.config, more = scan_config(checkpoint.folder)
        faults += more
        result.has_chat_template = _has_chat_template(checkpoint.folder)
        if result.config and headers_are_right:
            weight_map, more = scan_weights(result.config, checkpoint, probe=not options.check_data)
            faults += more
        result.runs_on = {"cpu": weight_map is not None, "cuda": False}
    if checkpoint.ignored_files:
        names = ", ".join(path.name for path in checkpoint.ignored_files)
        result.warnings.append(f"not part of the model and ignored: {names}")
    if result.config is not None:
        result.tied = weight_map.tied if weight_map else result.config.tie_word_embeddings
    if result.config is not None and weight_map is not None and result.runs_on:
        result.totals = count(checkpoint, weight_map)
        result.warnings += weight_map.warnings
        obstacles = cuda_faults(result.config, options.dtype)
        result.runs_on["cuda"] = not obstacles
        result.plan = _plan(result.config, weight_map, options, obstacles, result.warnings)
        if result.plan.device.cuda:
            faults += obstacles
    if options.check_data and headers_are_right:
        result.data, more = check_data(checkpoint, say)
        faults += more
    result.faults = [fault for fault in faults if not fault.unsupported]
    result.unsupported = [fault for fault in faults if fault.unsupported]
    return result


def _is_whole_model(path: Path, checkpoint: Checkpoint) -> bool:
    """Whether `path` stands for a model with its config.json, and not for a lone file or one shard of several."""
    if os.path.isdir(path):
        return True
    return os.path.exists(checkpoint.folder / "config.json") and find_weights(checkpoint.folder) == path


def count(checkpoint: Checkpoint, weight_map: WeightMap | None = None) -> Totals:
    """Sums over all tensors; with `weight_map`, a stored copy of tied embeddings counts no parameters."""
    copy = LM_HEAD if weight_map is not None and weight_map.tied and EMBED in checkpoint.tensors else None
    groups: dict[str, dict[str, list[TensorInfo]]] = {"dtype": {}, "part": {}}
    for tensor in checkpoint.tensors.values():
        groups["dtype"].setdefault(tensor.dtype, []).append(tensor)
        groups["part"].setdefault(part_of(tensor.name), []).append(tensor)

    def total(tensors: Iterable[TensorInfo]) -> Count:
        sizes: Counter[str] = Counter()
        for tensor in tensors:
            sizes["tensors"] += 1
            sizes["elements"] += 0 if tensor.name == copy else tensor.num_elements
            sizes["bytes"] += tensor.nbytes
        return Count(sizes["tensors"], sizes["elements"], sizes["bytes"])

    by_dtype = {dtype: total(group) for dtype, group in groups["dtype"].items()}
    by_dtype = dict(sorted(by_dtype.items(), key=lambda item: -item[1].num_bytes))
    by_part = {part: total(groups["part"][part]) for part in PARTS if part in groups["part"]}
    return Totals(total(checkpoint.tensors.values()), by_dtype, by_part)


def _plan(
    config: ModelConfig, weight_map: WeightMap, options: InspectOptions, obstacles: list[Fault], warnings: list[str]
) -> MemoryPlan:
    device = _device(options)
    if device.cuda and obstacles and options.device == "auto" and options.memory is None:
        warnings.append(f"planned for the CPU, because CUDA cannot be used: {obstacles[0]}")
        device = _cpu(None)
    dtype = pick_dtype(config.dtype, device.cuda) if options.dtype == "auto" else options.dtype
    if dtype not in ITEMSIZE:
        raise UserError(f"unknown dtype {dtype!r}", where="--dtype", exit_code=ExitCode.USAGE)
    limits = default_limits(
        config,
        device.cuda,
        options.max_num_seqs,
        options.max_model_len,
        options.max_batched_tokens,
        options.block_size,
    )
    plan = plan_memory(
        config,
        limits,
        dtype,
        device,
        weights_layout(config, ITEMSIZE[dtype], weight_map.tied)[1],
        memory_fraction=options.memory_fraction,
        kv_cache_memory=options.kv_cache_memory,
    )
    if plan.obstacle:
        warnings.append(plan.obstacle)
    elif not plan.full_length_seqs:
        warnings.append(
            f"not one sequence of {limits.max_model_len:,} tokens fits the KV cache; the longest that does has "
            f"{plan.largest_context:,} (--max-model-len)"
        )
    return plan


def _device(options: InspectOptions) -> Device:
    """What `generate` would run on, or a GPU of the memory that was asked for."""
    if options.device == "cpu":
        return _cpu(options.memory)
    if options.memory is not None:
        return Device("a GPU", True, options.memory, options.memory)
    gpu = find_gpu(visible_gpus())
    if gpu is None and options.device == "cuda":
        return Device("a GPU of any memory", True)
    return gpu or _cpu(None)


def _cpu(memory: int | None) -> Device:
    memory = available_memory() if memory is None else memory
    return Device("the CPU", False, memory, memory)


def _has_chat_template(folder: Path) -> bool:
    if any(os.path.exists(folder / name) for name in ("chat_template.jinja", "chat_template.json")):
        return True
    path = folder / "tokenizer_config.json"
    return os.path.exists(path) and bool(read_json(path)[0].get("chat_template"))
