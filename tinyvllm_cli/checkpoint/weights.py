"""Weights on the device: one arena, filled straight from the files, with QKV and gate/up fused on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from tinyvllm_cli.checkpoint.config import ModelConfig
from tinyvllm_cli.checkpoint.faults import quote
from tinyvllm_cli.checkpoint.header import TensorInfo
from tinyvllm_cli.checkpoint.names import WeightMap, WeightSlot, weights_layout
from tinyvllm_cli.errors import UserError

Progress = Callable[[int, int], None]
"""Called with bytes read and bytes in all."""

CHUNK_BYTES = 32 * 2**20
"""Size of a staging buffer; two of them are all that loading takes of host memory beside the weights themselves."""

_TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: attn_norm, mlp_norm [H]; qkv [(Q + 2K) * D, H]; o [H, Q * D]; gate_up [2I, H]; down [H, I]."""

    attn_norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights as views into `arena` (uint8): embed, lm_head [V, H], the same tensor when tied; final_norm [H]."""

    embed: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    lm_head: Tensor
    arena: Tensor


def arena_views(config: ModelConfig, arena: Tensor, dtype: torch.dtype, tied: bool | None = None) -> Weights:
    """The weights in an arena of `weights_layout(config, dtype.itemsize, tied)`; uint8, at a multiple of 256 bytes."""
    slots, _ = weights_layout(config, dtype.itemsize, tied)
    views = {slot.name: _view(slot, arena, dtype) for slot in slots}
    layers = []
    for layer in range(config.num_layers):
        names = ("attn_norm", "qkv", "o", "mlp_norm", "gate_up", "down")
        layers.append(LayerWeights(**{name: views[f"layers.{layer}.{name}"] for name in names}))
    embed = views["embed"]
    return Weights(embed, layers, views["final_norm"], views.get("lm_head", embed), arena)


def _view(slot: WeightSlot, arena: Tensor, dtype: torch.dtype) -> Tensor:
    flat = arena[slot.offset : slot.offset + slot.nbytes].view(dtype)
    if arena.device.type == "cpu" and slot.name.startswith("layers.") and len(slot.shape) == 2:
        return flat.view(slot.shape[::-1]).t()  # by columns: so x @ weight.T is faster there, for a few rows most
    return flat.view(slot.shape)


def load_weights(
    config: ModelConfig,
    weight_map: WeightMap,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Weights:
    """Reads all weights into one new arena on `device`, converted to `dtype` there.

    Host memory beside the arena stays below two staging buffers of 32 MiB. Returns when everything has arrived.
    UserError when memory does not suffice or a file has become shorter since its header was read.
    """
    slots, total = weights_layout(config, dtype.itemsize, weight_map.tied)
    arena = _allocate(total, device)
    all_bytes = sum(tensor.nbytes for group in weight_map.sources.values() for tensor in group)
    done = 0
    stage = _CudaStage(device) if device.type == "cuda" else _CpuStage()
    with ExitStack() as stack:
        files: dict[Path, FileIO] = {}
        for slot in slots:
            target = _view(slot, arena, dtype)
            for tensor in weight_map.sources[slot.name]:
                if tensor.file not in files:
                    files[tensor.file] = stack.enter_context(open(tensor.file, "rb", buffering=0))
                file = files[tensor.file]
                file.seek(weight_map.data_starts[tensor.file] + tensor.begin)
                part, target = target[: tensor.shape[0]], target[tensor.shape[0] :]
                for chunk in _chunks(part, tensor):
                    stage.fill(chunk, file, _TORCH_DTYPES[tensor.dtype])
                    done += chunk.numel() * _TORCH_DTYPES[tensor.dtype].itemsize
                    if progress:
                        progress(done, all_bytes)
        stage.finish()
    return arena_views(config, arena, dtype, weight_map.tied)


def _allocate(total: int, device: torch.device) -> Tensor:
    try:
        return torch.empty(total, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise UserError(
            f"the weights need {total / 2**20:,.0f} MiB, which {device} does not have",
            fix="Free memory there, choose a dtype of fewer bytes, or another --device.",
        ) from error


def _chunks(part: Tensor, tensor: TensorInfo) -> Iterator[Tensor]:
    """`part` in pieces of whole rows whose stored bytes fit a staging buffer."""
    rows = CHUNK_BYTES * len(part) // tensor.nbytes
    return (part[begin : begin + rows] for begin in range(0, len(part), rows))


def _read_into(file: FileIO, buffer: Tensor) -> None:
    """Fills a contiguous CPU tensor with the next bytes of `file`."""
    view = buffer.view(-1).view(torch.uint8).numpy().data
    while view:
        count = file.readinto(view)
        if not count:
            where = quote(str(file.name), 4096)
            raise UserError("the file has become shorter while it was read", where=where, fix="Fetch the file again.")
        view = view[count:]


class _CpuStage:
    """Reads into the arena itself, or through one buffer when the dtype or the order must change."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def fill(self, target: Tensor, file: FileIO, stored: torch.dtype) -> None:
        """Fills `target`, by rows, with the next target.numel() elements of dtype `stored` in `file`."""
        if stored == target.dtype and target.is_contiguous():
            _read_into(file, target)
            return
        if self.buffer is None:
            self.buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        source = self.buffer[: target.numel() * stored.itemsize].view(stored).view(target.shape)
        _read_into(file, source)
        target.copy_(source)

    def finish(self) -> None:
        """Everything has arrived already."""


class _CudaStage:
    """Reads into two pinned buffers in turn: while one is copied to the device, the other is filled."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.current_stream(device)
        self.pinned = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self.unconverted: Tensor | None = None
        self.turn = 0

    def fill(self, target: Tensor, file: FileIO, stored: torch.dtype) -> None:
        """As `_CpuStage.fill`; the copy is queued on the current stream and converted there."""
        self.turn ^= 1
        self.copied[self.turn].synchronize()  # at once for an event that was never recorded
        source = self.pinned[self.turn][: target.numel() * stored.itemsize].view(stored).view(target.shape)
        _read_into(file, source)
        if stored == target.dtype:
            target.copy_(source, non_blocking=True)
        else:
            if self.unconverted is None:
                self.unconverted = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=self.device)
            staged = self.unconverted[: target.numel() * stored.itemsize].view(stored).view(target.shape)
            staged.copy_(source, non_blocking=True)
            target.copy_(staged)
        self.copied[self.turn].record(self.stream)

    def finish(self) -> None:
        """Waits until everything has arrived."""
        self.stream.synchronize()
