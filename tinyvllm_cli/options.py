"""What options of the command line may be, and how their values are read."""

from __future__ import annotations

import re
from enum import StrEnum

import typer

from tinyvllm_cli.errors import ExitCode, UserError

_UNITS = {"": 1} | {
    f"{letter}{suffix}": base ** (power + 1)
    for power, letter in enumerate("kmgt")
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


class Device(StrEnum):
    """Choices of --device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DType(StrEnum):
    """Choices of --dtype."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class PromptFormat(StrEnum):
    """Choices of --format."""

    AUTO = "auto"
    TEXT = "text"
    JSONL = "jsonl"


class Sort(StrEnum):
    """Choices of --sort."""

    FILE = "file"
    NAME = "name"
    SIZE = "size"
    DTYPE = "dtype"
    SHAPE = "shape"


class Preset(StrEnum):
    """Choices of --preset."""

    TINY_VLLM = "tiny-vllm"


def parse_bytes(text: str) -> int:
    """ "512MiB", "2G" (powers of 1024), "1.5GB" (of 1000) or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = _UNITS.get("" if match is None or match[2] == "b" else match[2])
    if match is None or unit is None:
        raise typer.BadParameter(f"{text!r} is no size. Write bytes, or a number with K, M, G, T: 512MiB, 2G, 1.5GB.")
    return int(float(match[1]) * unit)


def parse_counts(text: str | None, option: str, least: int = 0) -> tuple[int, ...] | None:
    """ "512,2048" as numbers; None stays None."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", word) and int(word) >= least for word in words):
        raise UserError(
            f"{text!r} is no list of numbers of at least {least}",
            where=option,
            fix=f"Write {option} 512 or {option} 512,2048.",
            exit_code=ExitCode.USAGE,
        )
    return tuple(map(int, words))


def parse_words(text: str | None) -> tuple[str, ...]:
    """ "a,b" as words; nothing for None."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())
