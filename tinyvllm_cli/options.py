"""What options of the command line may be, and how their values are read."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tinyvllm_cli.errors import ExitCode, UserError

_UNITS = {"": 1} | {
    f"{letter}{suffix}": base ** (power + 1)
    for power, letter in enumerate("kmgt")
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


MAX_BYTES = 2**63 - 1


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
    OPENAI = "openai"


class Order(StrEnum):
    """Choices of --order."""

    INPUT = "input"
    FINISHED = "finished"


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


# Options of `generate`. None in sampling: what generation_config.json recommends, or else the default named.

PromptsFile = Annotated[
    str | None,
    typer.Option("--prompts", "-p", metavar="FILE", help="One prompt a line, or JSONL (*.jsonl); - is stdin."),
]
Format = Annotated[
    PromptFormat, typer.Option("--format", help="Of the prompts file or stdin; auto goes by name and first line.")
]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="DIR", help="Model folder. Default: $TINYVLLM_MODEL, ., the demo."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the records to this file, as JSONL.")
]
Stream = Annotated[
    bool | None,
    typer.Option("--stream/--no-stream", help="Show text as it comes. Default: for one prompt on a terminal."),
]
Samples = Annotated[
    int | None, typer.Option("--n", help="Answers to each prompt, with seeds of their own. Default: 1.")
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", "-n", help="Most new tokens for a prompt. Default: 256.")
]
Temperature = Annotated[float | None, typer.Option("--temperature", "-t", help="0 is greedy. Default: 0.")]
TopK = Annotated[int | None, typer.Option(help="Only the k most probable tokens; 0: all.")]
TopP = Annotated[float | None, typer.Option(help="Only the most probable tokens that sum up to p. Default: 1.")]
MinP = Annotated[float | None, typer.Option(help="Only tokens of this share of the highest probability. Default: 0.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: less of what prompt or answer have already. Default: 1.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="-2 to 2: less of what the answer has already. Default: 0.")
]
FrequencyPenalty = Annotated[float | None, typer.Option(help="-2 to 2: the same for each time it has it. Default: 0.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text, whatever runs beside it. Default: 0.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")]
StopTokenIds = Annotated[
    list[int] | None, typer.Option("--stop-token-id", metavar="ID", help="End at this token; repeatable.")
]
IgnoreEos = Annotated[bool | None, typer.Option("--ignore-eos", help="Go on behind the end-of-sequence token.")]
Logprobs = Annotated[
    int | None, typer.Option(metavar="K", help="Log-probabilities of each token and of the K most probable.")
]


def parse_bytes(text: str) -> int:
    """ "512MiB", "2G" (powers of 1024), "1.5GB" (of 1000) or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = _UNITS.get("" if match is None or match[2] == "b" else match[2])
    if match is None or unit is None:
        raise typer.BadParameter(f"{text!r} is no size. Write bytes, or a number with K, M, G, T: 512MiB, 2G, 1.5GB.")
    return int(min(float(match[1]) * unit, MAX_BYTES))


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


def parse_words(text: str | None, option: str) -> tuple[str, ...]:
    """ "a,b" as words; nothing for None."""
    words = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    if text is not None and not words:
        raise UserError("names nothing", where=option, fix="Leave it out, or give a word.", exit_code=ExitCode.USAGE)
    return words


# Options of the engine.

PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache", help="Compute once what prompts have in common at their beginning."
    ),
]
MaxNumSeqs = Annotated[int | None, typer.Option("--max-num-seqs", min=1, help="Most prompts that run at once.")]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", min=1, help="Most tokens of a prompt and its answer.")
]
MaxBatchedTokens = Annotated[int | None, typer.Option("--max-batched-tokens", min=1, help="Most tokens in one step.")]
BlockSize = Annotated[int, typer.Option("--block-size", min=1, help="Tokens in a block of the KV cache.")]
NoGraphs = Annotated[bool, typer.Option("--no-graphs", help="Do not capture CUDA graphs.")]
KVCacheMemory = Annotated[
    int | None,
    typer.Option("--kv-cache-memory", parser=parse_bytes, metavar="SIZE", help="Memory of the KV cache: 512MiB, 2G."),
]
MemoryFraction = Annotated[
    float, typer.Option("--memory-fraction", min=0.0, max=1.0, help="Share of the device memory to use.")
]
