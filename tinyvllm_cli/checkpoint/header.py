"""The header of a safetensors file, parsed and checked against everything that the format's specification says.

A file is 8 bytes of little-endian header length, a JSON header (name -> dtype, shape, data_offsets [begin, end)
relative to the data section), and the data section. Nothing is allocated from a length not checked against the file.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tinyvllm_cli.checkpoint.faults import Fault, is_int, quote, raise_any

MAX_HEADER_BYTES = 100_000_000
"""Longer headers are refused, as the reference reader does."""

MAX_COUNT = 2**64 - 1
"""Dimensions and element counts are unsigned 64-bit numbers."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip
"""Bits of one element of every dtype of the format."""

_AGAIN = "Fetch the file again: it is damaged, or not all of it has arrived."
_WEB_PAGE = ("looks like a web page, not weights", "The download was answered by a page: log in, or mend the URL.")
_LOOKALIKES = (
    (b"version https://git-lfs", "looks like a Git LFS pointer, not the weights", "Fetch the file with: git lfs pull"),
    (b"<!doctype", *_WEB_PAGE),
    (b"<html", *_WEB_PAGE),
    (b"<?xml", "looks like an XML document, not weights", "The download was answered by an error: mend the URL."),
    (b"gguf", "looks like a GGUF file, not safetensors", "Use the model's safetensors files."),
    (b"pk\x03\x04", "looks like a PyTorch or zip archive, not safetensors", "Use the model's safetensors files."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the header describes it; `begin` and `end` are offsets in the data section of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: Path

    @property
    def num_elements(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A file's header: `header_bytes` of JSON, then `data_bytes` of data from file offset `data_start` on."""

    path: Path
    header_bytes: int
    data_bytes: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def data_start(self) -> int:
        return 8 + self.header_bytes


def read_header(path: Path) -> Header:
    """Reads and checks the header of `path`. UserError that lists every fault."""
    header, faults = scan_header(path)
    raise_any(faults)
    assert header is not None
    return header


def scan_header(path: Path) -> tuple[Header | None, list[Fault]]:
    """The header, as far as it can be read (None: not at all), and all its faults."""
    where = quote(str(path), 4096)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for a writer
            return None, [Fault(where, "is not a file", "Give a .safetensors file.")]
        with open(path, "rb") as file:
            return scan_stream(path, file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        return None, [Fault(where, f"cannot be read: {error.strerror or error}", "Check the path and its permissions.")]


def scan_stream(path: Path, file: IO[bytes], size: int) -> tuple[Header | None, list[Fault]]:
    """As `scan_header`, of an open file of `size` bytes; `path` is what messages and tensors call it."""
    where = quote(str(path), 4096)
    text = _read(file, size, where)
    if isinstance(text, Fault):
        return None, [text]
    try:
        content = json.loads(text, object_pairs_hook=_Pairs, parse_int=_parse_int, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return None, [Fault(where, f"the header is not valid JSON: {_reason(error)}", _AGAIN)]
    header_bytes = len(text.encode())
    tensors, metadata, faults = _tensors(path, where, content)
    header = Header(path, header_bytes, size - 8 - header_bytes, tensors, metadata)
    if not faults:  # else some tensors are missing here, and holes would follow from that
        faults = _layout_faults(where, header)
    return header, faults


def _read(file: IO[bytes], size: int, where: str) -> str | Fault:
    """The header's JSON, or what is wrong with the frame."""
    start = file.read(64)
    length = int.from_bytes(start[:8], "little")
    if size < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
        return _frame_fault(where, start, size, length)
    file.seek(8)
    text = file.read(length)
    if len(text) != length:
        return Fault(where, f"the header ends after {len(text):,} of {length:,} bytes", _AGAIN)
    if text[:1] != b"{":
        return Fault(where, f"the header does not begin with {{ but with {text[:1]!r}", _AGAIN)
    try:
        return text.decode("utf-8")  # json.loads would guess the encoding of bytes
    except UnicodeDecodeError as error:
        return Fault(where, f"the header is not UTF-8: byte {text[error.start]:#04x} at {error.start:,}", _AGAIN)


def _frame_fault(where: str, start: bytes, size: int, length: int) -> Fault:
    for magic, what, fix in _LOOKALIKES:
        if start.lstrip().lower().startswith(magic):
            return Fault(where, what, fix)
    if size == 0:
        return Fault(where, "the file is empty", _AGAIN)
    if size < 8:
        return Fault(where, f"the file has {size} bytes; the length of the header alone takes 8", _AGAIN)
    if length > MAX_HEADER_BYTES:
        return Fault(where, f"the header would be {length:,} bytes long; at most {MAX_HEADER_BYTES:,} are read", _AGAIN)
    what = f"the header should have {length:,} bytes, but only {size - 8:,} follow"
    return Fault(where, what + f" (the file has {size:,}, expected at least {8 + length:,})", _AGAIN)


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as its pairs, so that duplicate keys can be seen."""


def _parse_int(text: str) -> int | float:
    return int(text) if text != "-0" else -0.0  # an unsigned number has no sign


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _tensors(path: Path, where: str, content: _Pairs) -> tuple[tuple[TensorInfo, ...], dict[str, str], list[Fault]]:
    """The tensors that are described rightly, the metadata, and a fault for everything else."""
    tensors: list[TensorInfo] = []
    metadata: dict[str, str] = {}
    faults: list[Fault] = []
    seen: set[str] = set()
    for name, value in content:
        if name in seen:
            faults.append(Fault(where, f"{quote(name)} occurs twice in the header"))
        seen.add(name)
        if name == "__metadata__":
            metadata = _metadata(where, value, faults)
            continue
        result = _tensor(path, name, value) if _is_text(name) else "the name is not valid Unicode"
        if isinstance(result, str):
            faults.append(Fault(where, f"tensor {quote(name)}: {result}"))
        else:
            tensors.append(result)
    return tuple(tensors), metadata, faults


def _metadata(where: str, value: Any, faults: list[Fault]) -> dict[str, str]:
    if not isinstance(value, _Pairs):
        faults.append(Fault(where, "__metadata__ is not an object"))
        return {}
    for key, text in value:
        if not isinstance(text, str) or not _is_text(key + text):
            faults.append(Fault(where, f"__metadata__: the value of {quote(key)} is not a string of valid Unicode"))
    return dict(value)


def _is_text(text: str) -> bool:
    """False for lone surrogates, which JSON can spell but UTF-8 cannot."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _tensor(path: Path, name: str, value: Any) -> TensorInfo | str:
    """The tensor, or what is wrong with its description."""
    if not isinstance(value, _Pairs):
        return f"its description is not an object but {quote(value)}"
    entry = dict(value)
    if len(entry) != len(value):
        return "a key occurs twice in its description"
    if len(entry) != 3 or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        missing = [key for key in ("dtype", "shape", "data_offsets") if key not in entry]
        return f"{missing[0]} is missing" if missing else f"unknown keys {quote(sorted(entry)[:5])}"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"unknown dtype {quote(dtype)}"
    if not _is_counts(shape):
        return f"shape {quote(shape)} is not a list of sizes"
    if not _is_counts(offsets) or len(offsets) != 2:
        return f"data_offsets {quote(offsets)} are not [begin, end]"
    begin, end = offsets
    if begin > end:
        return f"data_offsets [{begin:,}, {end:,}] end before they begin"
    bits = 1
    for factor in [*shape, DTYPE_BITS[dtype]]:
        bits *= factor
        if bits > MAX_COUNT:
            return f"the size of shape {quote(shape)} overflows 64 bits"
    if bits % 8:
        return f"{dtype} {quote(shape)} takes {bits:,} bits, which are no whole bytes"
    if bits != 8 * (end - begin):
        return f"{dtype} {quote(shape)} takes {bits // 8:,} bytes, but data_offsets span {end - begin:,}"
    return TensorInfo(name, dtype, tuple(shape), begin, end, path)


def _is_counts(value: Any) -> bool:
    return type(value) is list and all(is_int(count) and 0 <= count <= MAX_COUNT for count in value)


def _layout_faults(where: str, header: Header) -> list[Fault]:
    """Whether the tensors tile the data section: no overlap, no hole, nothing beyond either end."""
    faults = []
    cursor, last = 0, ""
    for tensor in sorted(header.tensors, key=lambda t: (t.begin, t.end)):
        span = f"[{tensor.begin:,}, {tensor.end:,})"
        if tensor.begin > cursor:
            after = f" behind {quote(last)}" if last else ""
            what = f"no tensor uses the {tensor.begin - cursor:,} bytes at [{cursor:,}, {tensor.begin:,}){after}"
            faults.append(Fault(where, f"hole: {what}"))
        elif tensor.begin < cursor:
            what = f"{quote(tensor.name)} at {span} begins inside {quote(last)}, which ends at {cursor:,}"
            faults.append(Fault(where, f"overlap: {what}"))
        if tensor.end >= cursor:
            cursor, last = tensor.end, tensor.name
    if cursor != header.data_bytes:
        state = "too short" if cursor > header.data_bytes else "too long"
        what = f"the data section is {state}: expected {cursor:,} bytes, there are {header.data_bytes:,}"
        expected, actual = header.data_start + cursor, header.data_start + header.data_bytes
        faults.append(Fault(where, f"{what} (file: expected {expected:,}, actual {actual:,})", _AGAIN))
    return faults
