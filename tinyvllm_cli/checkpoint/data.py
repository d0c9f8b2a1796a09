"""What the stored values are like: NaN, infinities, smallest, largest, a histogram; and where two files differ.

Reads at the speed of the disk: a few threads, each with one buffer. IEEE numbers are never decoded; their bit patterns,
read as integers, are in the order of the values (negative ones in the opposite order), so that three reductions over
integers find the extremes and tell whether there is anything that is not finite. Files are little-endian, this machine
need not be.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.checkpoint.faults import quote
from tinyvllm_cli.checkpoint.header import DTYPE_BITS, TensorInfo
from tinyvllm_cli.checkpoint.index import Checkpoint
from tinyvllm_cli.errors import UserError

Progress = Callable[[int, int], None]
"""Called with bytes read and bytes in all."""
Array = npt.NDArray[Any]

CHUNK_BYTES = 1 << 23
SAMPLE_SIZE = 1 << 16
"""A histogram is made of about so many values, taken at equal distances."""
BINS = 16

IEEE = {"F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "F32": ("<u4", 0x7F800000), "C64": ("<u4", 0x7F800000),
        "F64": ("<u8", 0x7FF0000000000000), "F8_E5M2": ("u1", 0x7C), "F8_E4M3": ("u1", 0x7F)}  # fmt: skip
"""Sign and magnitude: an unsigned integer of the same width, and the pattern of infinity (F8_E4M3: of its only NaN)."""
INTEGERS = {
    "BOOL": "u1",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
}
PACKED = ("F4", "F6_E2M3", "F6_E3M2")
"""Several values share a byte: not scanned."""


@dataclass(frozen=True, slots=True)
class TensorData:
    """Statistics of a tensor's values; of complex ones the parts count as values.

    Attributes:
        num_nan, num_inf: values that are not finite; first_bad: flat index of the first of them.
        minimum, maximum: of the finite values; None when there are none.
        histogram: counts of a sample's finite values in BINS equal steps from minimum to maximum; empty with them.
    """

    num_nan: int = 0
    num_inf: int = 0
    first_bad: int | None = None
    minimum: float | int | None = None
    maximum: float | int | None = None
    histogram: tuple[int, ...] = ()


class _Piece(NamedTuple):
    """Statistics of one chunk; `sample` as float64."""

    num_nan: int
    num_inf: int
    first_bad: int | None
    low: float | int | None
    high: float | int | None
    sample: Array


def scan_data(checkpoint: Checkpoint, progress: Progress | None = None) -> dict[str, TensorData]:
    """Reads all values of all tensors but packed ones. UserError when a file has become shorter."""
    tensors = [tensor for tensor in checkpoint.tensors.values() if tensor.dtype not in PACKED]
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    found: dict[str, list[_Piece]] = {tensor.name: [] for tensor in tensors}
    result: dict[str, TensorData] = {}
    for tensor, piece, nbytes in _in_order(checkpoint, tensors):
        found[tensor.name].append(piece)
        done += nbytes
        if progress:
            progress(done, total)
    for tensor in tensors:
        result[tensor.name] = _merge(found[tensor.name])
    return result


def _in_order(checkpoint: Checkpoint, tensors: Iterable[TensorInfo]) -> Iterator[tuple[TensorInfo, _Piece, int]]:
    """Pieces of all tensors, in order, read and reduced by several threads, not many ahead of the reader."""
    threads = min(8, 2 * (os.cpu_count() or 1))  # half of them wait for the disk
    mine = local()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        files: dict[Path, int] = {}
        waiting: deque[tuple[TensorInfo, Future[_Piece], int]] = deque()

        def work(tensor: TensorInfo, descriptor: int, begin: int, nbytes: int) -> _Piece:
            if not hasattr(mine, "buffer"):
                mine.buffer = np.empty(CHUNK_BYTES, np.uint8)
            data = mine.buffer[:nbytes]
            _read(tensor.file, descriptor, data, checkpoint.data_start(tensor.file) + tensor.begin + begin)
            return _reduce(tensor, data, begin)

        for tensor in tensors:
            if tensor.file not in files:
                file = stack.enter_context(open(tensor.file, "rb", buffering=0))
                files[tensor.file] = file.fileno()
            for begin in range(0, tensor.nbytes, CHUNK_BYTES):
                nbytes = min(CHUNK_BYTES, tensor.nbytes - begin)
                waiting.append((tensor, pool.submit(work, tensor, files[tensor.file], begin, nbytes), nbytes))
                if len(waiting) > 3 * threads:
                    first, future, size = waiting.popleft()
                    yield first, future.result(), size
        for first, future, size in waiting:
            yield first, future.result(), size


def _read(path: Path, descriptor: int, data: Array, offset: int) -> None:
    view = data.data
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            what = "the file has become shorter while it was read"
            raise UserError(what, where=quote(str(path), 4096), fix="Fetch the file again.")
        view, offset = view[count:], offset + count


def _reduce(tensor: TensorInfo, data: Array, begin: int) -> _Piece:
    """Statistics of the bytes from `begin` of a tensor on."""
    index = begin * 8 // DTYPE_BITS[tensor.dtype]
    if tensor.dtype == "C64":
        index *= 2
    step = max(1, tensor.num_elements // SAMPLE_SIZE) | 1  # odd, so that no matrix is sampled in one column only
    if tensor.dtype in IEEE:
        width, infinity = IEEE[tensor.dtype]
        return _reduce_ieee(tensor.dtype, data.view(width), infinity, index, step)
    if tensor.dtype in INTEGERS:
        values = data.view(INTEGERS[tensor.dtype])
        sample = values[-index % step :: step].astype(np.float64)
        return _Piece(0, 0, None, int(values.min()), int(values.max()), sample)
    return _reduce_bytes(_values_of_bytes(tensor.dtype), data, index, step)


def _reduce_ieee(dtype: str, bits: Array, infinity: int, index: int, step: int) -> _Piece:
    sign = 1 << (8 * bits.dtype.itemsize - 1)
    sample = _decode(dtype, bits[-index % step :: step])
    num_nan, num_inf, first_bad = 0, 0, None
    low, high, top = _extremes(bits)
    if top >= infinity or high >= sign | infinity:
        magnitude = bits & bits.dtype.type(sign - 1)
        bad = magnitude >= infinity
        num_nan = int(np.count_nonzero(magnitude > infinity))
        num_inf = int(np.count_nonzero(bad)) - num_nan
        if dtype == "F8_E4M3":
            num_nan, num_inf = num_inf, 0
        first_bad = index + int(bad.argmax())
        bits, sample = bits[~bad], sample[np.isfinite(sample)]
        if not len(bits):
            return _Piece(num_nan, num_inf, first_bad, None, None, sample)
        low, high, top = _extremes(bits)
    smallest = high if high >= sign else low
    largest = top if top >= 0 else low
    minimum, maximum = _decode(dtype, np.array([smallest, largest], bits.dtype))
    return _Piece(num_nan, num_inf, first_bad, float(minimum), float(maximum), sample)


def _extremes(bits: Array) -> tuple[int, int, int]:
    """Smallest and largest pattern as unsigned, and largest as signed integers."""
    signed = bits.view(bits.dtype.str.replace("u", "i"))
    return int(bits.min()), int(bits.max()), int(signed.max())


def _decode(dtype: str, bits: Array) -> Array:
    """Values, float64, of the patterns of an IEEE dtype."""
    if bits.dtype.itemsize == 1:
        return _values_of_bytes(dtype)[bits]
    if dtype == "BF16":
        bits = bits.astype("<u4") << np.uint32(16)
    with np.errstate(invalid="ignore"):
        return np.ascontiguousarray(bits).view(f"<f{bits.dtype.itemsize}").astype(np.float64)


def _reduce_bytes(values: Array, data: Array, index: int, step: int) -> _Piece:
    """By counting each of the 256 patterns, whose values are given."""
    counts = np.bincount(data, minlength=256)
    nan, inf = np.isnan(values), np.isinf(values)
    bad = (nan | inf) & (counts > 0)
    sample = values[data[-index % step :: step]]
    first_bad = index + int(bad[data].argmax()) if bad.any() else None
    finite = values[(counts > 0) & ~nan & ~inf]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (None, None)
    return _Piece(int(counts[nan].sum()), int(counts[inf].sum()), first_bad, low, high, sample[np.isfinite(sample)])


def _values_of_bytes(dtype: str) -> Array:
    """The values, float64 [256], of all patterns of an 8-bit dtype."""
    pattern = np.arange(256)
    if dtype == "F8_E8M0":
        return np.append(np.ldexp(1.0, pattern[:-1] - 127), np.nan)
    mantissa_bits = 3 if "E4M3" in dtype else 2
    unsigned = dtype.endswith("FNUZ")  # no negative zero, no infinities; its pattern means NaN
    bias = (8 if unsigned else 7) if mantissa_bits == 3 else (16 if unsigned else 15)
    exponent = (pattern & 0x7F) >> mantissa_bits
    fraction = (pattern & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    size = np.where(exponent > 0, np.ldexp(1 + fraction, exponent - bias), np.ldexp(fraction, 1 - bias))
    values = np.where(pattern >= 0x80, -size, size)
    if unsigned:
        values[0x80] = np.nan
    elif mantissa_bits == 3:
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[[0x7C, 0xFC]], values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = (np.inf, -np.inf), np.nan
    return values


def _merge(pieces: list[_Piece]) -> TensorData:
    lows = [piece.low for piece in pieces if piece.low is not None]
    highs = [piece.high for piece in pieces if piece.high is not None]
    low, high = min(lows, default=None), max(highs, default=None)
    histogram: tuple[int, ...] = ()
    if low is not None and high is not None and np.isfinite(float(high) - float(low)):
        sample = np.concatenate([piece.sample for piece in pieces])
        counts, _ = np.histogram(sample, BINS, (float(low), float(high)))
        histogram = tuple(map(int, counts))
    return TensorData(
        num_nan=sum(piece.num_nan for piece in pieces),
        num_inf=sum(piece.num_inf for piece in pieces),
        first_bad=next((piece.first_bad for piece in pieces if piece.first_bad is not None), None),
        minimum=low,
        maximum=high,
        histogram=histogram,
    )


def count_differences(a: Checkpoint, b: Checkpoint, name: str) -> int:
    """How many elements (bytes, of packed dtypes) of a tensor that both hold in one dtype and shape differ."""
    first, second = a.tensors[name], b.tensors[name]
    width = DTYPE_BITS[first.dtype] // 8 if first.dtype not in PACKED else 1
    start_a, start_b = a.data_start(first.file) + first.begin, b.data_start(second.file) + second.begin
    buffers = [np.empty(min(CHUNK_BYTES, first.nbytes), np.uint8) for _ in range(2)]
    count = 0
    with open(first.file, "rb", buffering=0) as file_a, open(second.file, "rb", buffering=0) as file_b:
        for begin in range(0, first.nbytes, CHUNK_BYTES):
            ours, theirs = (buffer[: first.nbytes - begin] for buffer in buffers)
            _read(first.file, file_a.fileno(), ours, start_a + begin)
            _read(second.file, file_b.fileno(), theirs, start_b + begin)
            count += int(np.count_nonzero(ours.view(f"<u{width}") != theirs.view(f"<u{width}")))
    return count
