"""Reads the small JSON files of a checkpoint, which come from anywhere and may hold anything."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from tinyvllm_cli.checkpoint.faults import Fault, quote

MAX_JSON_BYTES = 100_000_000


def read_json(path: Path) -> tuple[dict[str, Any], list[Fault]]:
    """The object in `path` and no fault, or {} and what is wrong: unreadable, too long, no UTF-8, no JSON object."""
    where = quote(str(path), 4096)
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return {}, [Fault(where, "is not a file")]
        if status.st_size > MAX_JSON_BYTES:
            what = f"has {status.st_size:,} bytes; at most {MAX_JSON_BYTES:,} are read"
            return {}, [Fault(where, what, "Is it the right file?")]
        data = path.read_bytes()
    except FileNotFoundError:
        return {}, [Fault(where, "there is no such file", "Give a complete model folder.")]
    except OSError as error:
        return {}, [Fault(where, f"cannot be read: {error.strerror or error}")]
    return parse_json(data, where)


def parse_json(data: bytes, where: str) -> tuple[dict[str, Any], list[Fault]]:
    """As `read_json`, of bytes that are here already; `where` is what messages call them."""
    if data.startswith(b"version https://git-lfs"):
        return {}, [Fault(where, "looks like a Git LFS pointer, not JSON", "Fetch the file with: git lfs pull")]
    try:
        content = json.loads(
            data.decode("utf-8-sig"),
            object_pairs_hook=_object,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError as error:
        return {}, [Fault(where, f"is not UTF-8: byte {data[error.start]:#04x} at {error.start:,}", "Fetch it again.")]
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        return {}, [Fault(where, f"is not valid JSON: {reason}", "Fetch the file again.")]
    if not isinstance(content, dict):
        return {}, [Fault(where, "is not a JSON object", "Fetch the file again.")]
    return content, []


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {quote(twice)} occurs twice")
    return content


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{quote(text)} is too large")
    return number


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")
