"""Which model it is: a short name for the content of a model folder, that another content will not have."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tinyvllm_cli.checkpoint.index import INDEX_SUFFIX

NAMES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.json", "chat_template.jinja"),
)
PIECE = 64 * 1024
PIECES = 16


def model_identity(folder: Path) -> str:
    """16 hexadecimal digits of the names and contents of a model's JSON files (NAMES), template and weights.

    Other files may come and go: answers, for one, when the model is the current folder.

    Small files count whole; of a file of weights, its size and 16 pieces of 64 KiB spread evenly over it: training or
    another conversion changes them all, and a checkpoint of 100 GB is read in milliseconds.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.is_file():  # a folder, a pipe, a link that leads nowhere: no part of a model
            continue
        if path.name in NAMES or path.name.endswith(INDEX_SUFFIX):
            _add(digest, path.name, path.read_bytes())
        elif path.suffix == ".safetensors":
            _add(digest, path.name, _samples(path))
    return digest.hexdigest()[:16]


def _samples(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= PIECE * PIECES:
            return file.read()
        pieces = [str(size).encode()]
        for i in range(PIECES):
            file.seek((size - PIECE) * i // (PIECES - 1))
            pieces.append(file.read(PIECE))
    return b"".join(pieces)


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    digest.update(f"{name}\0{len(content)}\0".encode())
    digest.update(content)
