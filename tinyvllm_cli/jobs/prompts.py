"""Where prompts come from: arguments, text files of one prompt a line, JSONL files, standard input.

Rules for files: UTF-8, with or without a BOM; lines end with LF or CRLF, the last one may lack it; blank lines are
skipped and have no index; whatever else stands in a line of a text file is the prompt, spaces included. A whole file as
one prompt is its text, blank lines included, without a BOM and without the last line end. A line of JSONL is an object
with one of `prompt` (text), `messages` (a chat) or `prompt_token_ids`, perhaps `id`, and perhaps sampling parameters of
its own; or, if the first line is one, a request of OpenAI's batch format (see `jobs.lines`). A line that cannot be used
becomes a Prompt with `error` set, in its place; the job goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, Literal

from tinyvllm_cli.errors import ExitCode, UserError
from tinyvllm_cli.jobs.lines import Prompt, form_of, parse_line

Format = Literal["auto", "text", "jsonl", "openai"]

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is an error record: no prompt is so long, but a file without line ends is."""


class PromptSource:
    """Prompts to iterate over once; only a few are in memory at a time.

    Attributes:
        name: file, "standard input" or "arguments".
        total: number of prompts when it is known beforehand.
        is_single: whether there is exactly one.
        is_batch: whether they are requests of OpenAI's batch format.
        digest: SHA-256 of the input, None when it can be read only once.
    """

    def __init__(
        self, name: str, prompts: Iterable[Prompt], total: int | None = None, digest: str | None = None
    ) -> None:
        iterator = iter(prompts)
        first = list(islice(iterator, 2))
        if not first:
            raise UserError("holds no prompt", where=name, fix="Write one prompt a line.")
        self.name = name
        self.is_single = len(first) == 1
        self.is_batch = first[0].api != ""
        self.total = 1 if self.is_single else total
        self.digest = digest
        self._prompts = chain(first, iterator)

    def __iter__(self) -> Iterator[Prompt]:
        return self._prompts


def from_arguments(texts: Sequence[str]) -> PromptSource:
    """Prompts given on the command line. UserError when one is empty (as a rule an unset variable) or no UTF-8."""
    texts = list(texts)
    for place, text in enumerate(texts, 1):
        if not text:
            raise UserError(f"prompt {place} is empty", fix="Write a text, or leave it out.", exit_code=ExitCode.USAGE)
        try:
            if any(0xDC80 <= ord(char) <= 0xDCFF for char in text):  # bytes that the locale does not know
                texts[place - 1] = os.fsencode(text).decode("utf-8")
        except UnicodeError as error:
            what = f"prompt {place} is not UTF-8"
            raise UserError(what, fix="Convert it to UTF-8.", exit_code=ExitCode.USAGE) from error
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    prompts = (Prompt(index, text=text) for index, text in enumerate(texts))
    return PromptSource("arguments", prompts, len(texts), digest)


def source_stat(name: str) -> os.stat_result | None:
    """What an input of that name is, "-" being standard input; None where there is nothing to be read."""
    try:
        return os.fstat(sys.stdin.fileno()) if name == "-" else os.stat(name)
    except (OSError, ValueError, AttributeError):  # standard input may be closed, or no file
        return None


def from_file(name: str, form: Format = "auto", *, whole: bool = False) -> PromptSource:
    """Prompts of a file, or of standard input for "-".

    Args:
        name: path, or "-".
        form: "text" (one prompt a line), "jsonl", "openai" (its batch format), or "auto": what the first line is, and
            JSONL also when the name ends in .jsonl, .ndjson or .json.
        whole: the file is one prompt.

    Raises:
        UserError: the file is missing, unreadable, binary, or holds no prompt.
    """
    named = name.lower().endswith((".jsonl", ".ndjson"))
    if whole and form == "auto" and not named:
        form = "text"
    otherwise: Format = "jsonl" if named or name.lower().endswith(".json") else "text"
    if whole and form != "text":
        raise UserError("--whole-file is for text, not for JSONL", fix="Use one of them.", exit_code=ExitCode.USAGE)
    total, digest = None, None
    if name == "-":
        shown = "standard input"
        if sys.stdin is None:
            raise UserError("is closed", where=shown, fix="Give prompts as arguments or by --prompts FILE.")
        stream: BinaryIO = sys.stdin.buffer
    else:
        shown = name
        try:
            stream = Path(name).open("rb")  # noqa: SIM115 (read to the end by the source)
            if Path(name).is_file():  # a device may have no end
                total, digest = _count_prompts(name), _digest(name)
        except OSError as error:
            raise UserError(
                f"cannot be read: {error.strerror}",
                where=shown,
                fix="--prompts takes a text or JSONL file, or - for standard input.",
            ) from error
    try:
        _refuse_binary(shown, stream)
        return PromptSource(shown, _whole(shown, stream) if whole else _parse(stream, form, otherwise), total, digest)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=shown, fix="Check the file.") from error


def _count_prompts(name: str) -> int:
    with Path(name).open("rb") as stream:
        return sum(1 for _ in _lines(stream))


def _digest(name: str) -> str:
    with Path(name).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _refuse_binary(shown: str, stream: BinaryIO) -> None:
    peek: Callable[[int], bytes] | None = getattr(stream, "peek", None)
    head = peek(8192) if peek else b""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        kind, fix = "is UTF-16", "Save it as UTF-8."
    elif head.startswith(b"\x1f\x8b"):
        kind, fix = "is compressed with gzip", f"Try: zcat {shown} | tinyvllm generate --prompts -"
    elif b"\0" in head:
        kind, fix = "is a binary file", "Prompts are text, one a line, or JSONL."
    else:
        return
    raise UserError(kind, where=shown, fix=fix)


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """(number, content) of each line that is not blank, without its end and the BOM; None for one that is too long."""
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES):
        number += 1
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
            while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif raw.strip():
            yield number, raw.removesuffix(b"\n").removesuffix(b"\r")


def _whole(shown: str, stream: BinaryIO) -> Iterator[Prompt]:
    with stream:
        raw = stream.read(MAX_LINE_BYTES + 1)
    try:
        if len(raw) > MAX_LINE_BYTES:
            raise ValueError(f"longer than {MAX_LINE_BYTES // 2**20} MiB")
        text = _decode(raw.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").removesuffix(b"\r"))
    except ValueError as error:
        raise UserError(f"cannot be a prompt: {error}", where=shown, fix="Check the file.") from error
    if text:
        yield Prompt(0, 1, text=text)


def _parse(stream: BinaryIO, form: Format, otherwise: Format) -> Iterator[Prompt]:
    """The prompts; `otherwise` is what "auto" means when the first line looks like text."""
    with stream:
        for index, (line, raw) in enumerate(_lines(stream)):
            try:
                if raw is None:
                    raise ValueError(f"longer than {MAX_LINE_BYTES // 2**20} MiB")
                text = _decode(raw)
                if form == "auto":
                    first = form_of(text)
                    form = otherwise if first == "text" else first
                is_text = form == "text"
                yield Prompt(index, line, text=text) if is_text else parse_line(text, index, line, form == "openai")
            except ValueError as error:
                yield Prompt(index, line, api="chat" if form == "openai" else "", error=f"line {line}: {error}")


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}") from error
