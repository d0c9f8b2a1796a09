"""Writes safetensors files, shards and JSON by hand, so that every byte can be wrong on purpose. No torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Tensors = dict[str, npt.NDArray[Any]]

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_raw(path: Path, header: bytes | Mapping[str, Any], data: bytes = b"", length: int | None = None) -> Path:
    """Writes a RAW file: length (the header's, unless given), header (bytes, or an object to encode), data."""
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def write_tensors(path: Path, tensors: Tensors, dtype: str = "float32") -> Path:
    """Writes a safetensors file. Floating arrays are stored as `dtype` (float32, float16, bfloat16)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks, begin = [], 0
    for name, array in tensors.items():
        data = _encode(array, dtype)
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(array.shape), "data_offsets": [begin, begin + len(data)]}
        chunks.append(data)
        begin += len(data)
    return write_raw(path, header, b"".join(chunks))


def _encode(array: npt.NDArray[Any], dtype: str) -> bytes:
    array = np.ascontiguousarray(array, dtype=np.float32)
    if dtype == "float32":
        return array.astype("<f4").tobytes()
    if dtype == "float16":
        return array.astype("<f2").tobytes()
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()  # round to nearest, ties to even


def write_shards(folder: Path, tensors: Tensors, dtype: str = "float32", num_shards: int = 1) -> None:
    """Writes model.safetensors, or `num_shards` shards and model.safetensors.index.json."""
    if num_shards == 1:
        write_tensors(folder / "model.safetensors", tensors, dtype)
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        write_tensors(folder / file, {name: tensors[name] for name in part}, dtype)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file's object; the value `...` removes the key. Creates the file if need be."""
    content = json.loads(path.read_text()) if path.exists() else {}
    for key, value in changes.items():
        if value is ...:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content))
