"""Which files make up a checkpoint: one .safetensors file, or shards that an index.json names."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tinyvllm_cli.checkpoint.faults import Fault, quote, raise_any
from tinyvllm_cli.checkpoint.header import Header, TensorInfo, scan_header
from tinyvllm_cli.checkpoint.json_file import read_json
from tinyvllm_cli.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
ROPE_TABLES = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
"""A pattern of the names of tensors that RoPE's settings determine."""
_NEEDLESS = re.compile(rf"lm_head\.weight|model\.embed_tokens\.weight|{ROPE_TABLES}")
"""Tensors that a model may do without: either of a tied pair, tables of RoPE. Indices of converted models name such."""
_FETCH = "Fetch the missing files of the model again, or give another path."


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a model and the files that hold them.

    Attributes:
        folder: where config.json would be.
        tensors: every tensor by name, in the order of files and headers.
        files: the headers of the files used.
        ignored_files: .safetensors files of the folder that do not belong to the model.
        index: the index.json, or None for a single file.
    """

    folder: Path
    tensors: dict[str, TensorInfo]
    files: tuple[Header, ...]
    ignored_files: tuple[Path, ...] = ()
    index: Path | None = None

    def data_start(self, file: Path) -> int:
        """Offset in `file` where its data section begins."""
        return next(header.data_start for header in self.files if header.path == file)


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads and checks all headers of a folder, a .safetensors file or an index.json. UserError lists every fault."""
    checkpoint, faults = scan_checkpoint(path)
    raise_any(faults)
    return checkpoint


def scan_checkpoint(path: Path) -> tuple[Checkpoint, list[Fault]]:
    """What can be read of the checkpoint at `path`, and all faults. UserError when there is nothing at `path`."""
    if not os.path.exists(path):
        raise UserError("there is no such file or folder", where=quote(str(path), 4096), fix="Check the path.")
    if os.path.isdir(path):
        weights = find_weights(path)
        if isinstance(weights, Fault):
            return Checkpoint(path, {}, ()), [weights]
        path = weights
    if path.name.endswith(".json"):
        return _scan_index(path)
    return _scan_single(path)


def find_weights(folder: Path) -> Path | Fault:
    """The file of a model folder that stands for its weights: an index.json or a .safetensors file."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return Fault(quote(str(folder), 4096), f"cannot be read: {error.strerror or error}")
    weights = [name for name in names if name.endswith(".safetensors")]
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    for candidates in ([SINGLE_FILE], [SINGLE_FILE + ".index.json"], indices, weights):  # as transformers does
        present = [name for name in candidates if name in names]
        if len(present) == 1:
            return folder / present[0]
    where = quote(str(folder), 4096)
    if weights:
        what = f"{len(weights)} .safetensors files, and no {SINGLE_FILE}.index.json that says how they belong together"
        return Fault(where, what, "Fetch the index, or give one of the files.")
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
    hint = f" (there is {quote(others[0])}, which tinyvllm does not read)" if others else ""
    what = f"no weights: neither {SINGLE_FILE} nor {SINGLE_FILE}.index.json{hint}"
    return Fault(where, what, "Give a folder with safetensors weights.")


def _scan_single(path: Path) -> tuple[Checkpoint, list[Fault]]:
    header, faults = scan_header(path)
    if header is None:
        return Checkpoint(path.parent, {}, ()), faults
    tensors = {tensor.name: tensor for tensor in header.tensors}
    ignored = _ignored(path.parent, {path.name}) if path.name == SINGLE_FILE else ()
    return Checkpoint(path.parent, tensors, (header,), ignored), faults


def _scan_index(path: Path) -> tuple[Checkpoint, list[Fault]]:
    weight_map, faults = _read_index(path)
    shards: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        shards.setdefault(file, []).append(name)
    headers, tensors = [], {}
    for file, expected in shards.items():
        shard = path.parent / file
        if not os.path.exists(shard):
            what = f"the shard is missing; {len(expected):,} tensors should be in it, such as {quote(expected[0])}"
            faults.append(Fault(quote(str(shard), 4096), what, _FETCH))
            continue
        header, found = scan_header(shard)
        faults += found
        if header is None:
            continue
        headers.append(header)
        held = {tensor.name: tensor for tensor in header.tensors}
        if not found:
            faults += _disagreements(path, shard, expected, held, weight_map)
        tensors.update({name: tensor for name, tensor in held.items() if weight_map.get(name) == file})
    ignored = _ignored(path.parent, set(shards))
    return Checkpoint(path.parent, tensors, tuple(headers), ignored, path), faults


def _disagreements(
    index: Path, shard: Path, expected: list[str], held: dict[str, TensorInfo], weight_map: dict[str, str]
) -> list[Fault]:
    """Tensors that index and shard do not both place in this shard."""
    where = quote(str(shard), 4096)
    faults = [
        Fault(where, f"tensor {quote(name)} is not in this shard, where {index.name} places it", _FETCH)
        for name in expected
        if name not in held and not _NEEDLESS.fullmatch(name)
    ]
    for name in held:
        other = weight_map.get(name)
        if other != shard.name:
            place = f"places it in {quote(other)}" if other else "does not know it"
            faults.append(Fault(where, f"tensor {quote(name)} is in this shard, but {index.name} {place}", _FETCH))
    return faults


def _read_index(path: Path) -> tuple[dict[str, str], list[Fault]]:
    """The index's weight_map, without entries that lead out of the folder, and the faults."""
    where = quote(str(path), 4096)
    content, faults = read_json(path)
    weight_map = content.get("weight_map")
    if faults:
        return {}, faults
    if not isinstance(weight_map, dict) or not weight_map:
        return {}, [
            Fault(where, "it has no weight_map, so it is no index of a checkpoint", "Give the index, or a folder.")
        ]
    good: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name, file in weight_map.items():
        if isinstance(file, str) and is_plain(file):
            good[name] = file
        else:
            refused.setdefault(file if isinstance(file, str) else repr(file), name)
    for file, name in refused.items():
        what = f"weight_map places {quote(name)} in {quote(file)}, which is no plain file name in this folder"
        faults.append(Fault(where, what, "Mend the index: shards lie beside it."))
    return good, faults


def is_plain(file: str) -> bool:
    """Whether a shard's name is a file name and nothing that could lead out of the folder."""
    if file in ("", ".", "..") or not file.isprintable() or set(file) & set("/\\"):
        return False
    return len(file.encode()) <= 255  # printable text has no lone surrogates


def _ignored(folder: Path, used: set[str]) -> tuple[Path, ...]:
    try:
        return tuple(sorted(p for p in folder.iterdir() if p.name.endswith(".safetensors") and p.name not in used))
    except OSError:
        return ()
