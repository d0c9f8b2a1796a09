"""Where prompts come from: arguments, text files of one prompt a line, JSONL files, standard input.

Rules for files: UTF-8, with or without a BOM; lines end with LF or CRLF, the last one may lack it; blank lines are
skipped and have no index; whatever else stands in a line of a text file is the prompt, spaces included. A line of JSONL
is an object with one of `prompt` (text), `messages` (a chat) or `prompt_token_ids`, perhaps `id`, and perhaps sampling
parameters of its own. A line that cannot be used becomes a Prompt with `error` set, in its place; the job goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

from tinyvllm_cli.errors import ExitCode, UserError

Format = Literal["auto", "text", "jsonl"]

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is an error record: no prompt is so long, but a file without line ends is."""

_PARAMETERS: dict[str, tuple[tuple[type, ...], str]] = {
    "max_tokens": ((int,), "an integer"),
    "temperature": ((int, float), "a number"),
    "top_k": ((int,), "an integer"),
    "top_p": ((int, float), "a number"),
    "min_p": ((int, float), "a number"),
    "seed": ((int,), "an integer"),
    "ignore_eos": ((bool,), "true or false"),
    "stop_token_ids": ((list,), "a list of token ids"),
}
_UNSUPPORTED = {"stop", "n", "logprobs", "logit_bias", "tools", "response_format"} | {
    f"{kind}_penalty" for kind in ("repetition", "presence", "frequency")
}
_CONTENT = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a job.

    Attributes:
        index: its place among the prompts, from 0.
        line: its line in the file, from 1; 0 for a prompt from the command line.
        text, messages, token_ids: the prompt in one of its three forms; all None when there is an error.
        id: the line's own `id`.
        parameters: sampling parameters that the line sets, by their names in SamplingParams.
        unknown_keys: keys of the line that mean nothing here.
        error: why the line cannot be used, else "".
    """

    index: int
    line: int = 0
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    token_ids: Sequence[int] | None = None
    id: str | int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    unknown_keys: tuple[str, ...] = ()
    error: str = ""

    @property
    def title(self) -> str:
        """The prompt as people know it: its text, or the last message's."""
        if self.text is not None:
            return self.text
        if self.messages:
            return str(self.messages[-1].get("content"))
        if self.token_ids is not None:
            return f"{len(self.token_ids)} token ids"
        return f"line {self.line}"


class PromptSource:
    """Prompts to iterate over once; only a few are in memory at a time.

    Attributes:
        name: file, "standard input" or "arguments".
        total: number of prompts when it is known beforehand.
        is_single: whether there is exactly one.
    """

    def __init__(self, name: str, prompts: Iterable[Prompt], total: int | None = None) -> None:
        iterator = iter(prompts)
        first = list(islice(iterator, 2))
        if not first:
            raise UserError("holds no prompt", where=name, fix="Write one prompt a line.")
        self.name = name
        self.is_single = len(first) == 1
        self.total = 1 if self.is_single else total
        self._prompts = chain(first, iterator)

    def __iter__(self) -> Iterator[Prompt]:
        return self._prompts


def from_arguments(texts: Sequence[str]) -> PromptSource:
    """Prompts given on the command line. UserError when one is empty (as a rule an unset variable) or no UTF-8."""
    for place, text in enumerate(texts, 1):
        if not text:
            raise UserError(f"prompt {place} is empty", fix="Write a text, or leave it out.", exit_code=ExitCode.USAGE)
        if any(0xD800 <= ord(char) < 0xE000 for char in text):
            raise UserError(f"prompt {place} is not UTF-8", fix="Convert it to UTF-8.", exit_code=ExitCode.USAGE)
    return PromptSource("arguments", (Prompt(index, text=text) for index, text in enumerate(texts)), len(texts))


def from_file(name: str, form: Format = "auto") -> PromptSource:
    """Prompts of a file, or of standard input for "-".

    Args:
        name: path, or "-".
        form: "text" (one prompt a line), "jsonl", or "auto": jsonl when the name ends in .jsonl or .ndjson.

    Raises:
        UserError: the file is missing, unreadable, binary, or holds no prompt.
    """
    jsonl = form == "jsonl" or (form == "auto" and name.lower().endswith((".jsonl", ".ndjson")))
    if name == "-":
        shown, total = "standard input", None
        if sys.stdin is None:
            raise UserError("is closed", where=shown, fix="Give prompts as arguments or by --prompts FILE.")
        stream: BinaryIO = sys.stdin.buffer
    else:
        shown = name
        try:
            stream = Path(name).open("rb")  # noqa: SIM115 (read to the end by the source)
            total = _count_prompts(name) if stream.seekable() else None
        except OSError as error:
            raise UserError(
                f"cannot be read: {error.strerror}",
                where=shown,
                fix="--prompts takes a text or JSONL file, or - for standard input.",
            ) from error
    try:
        _refuse_binary(shown, stream)
        return PromptSource(shown, _parse(stream, jsonl), total)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=shown, fix="Check the file.") from error


def _count_prompts(name: str) -> int:
    with Path(name).open("rb") as stream:
        return sum(1 for _ in _lines(stream))


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


def _parse(stream: BinaryIO, jsonl: bool) -> Iterator[Prompt]:
    with stream:
        for index, (line, raw) in enumerate(_lines(stream)):
            try:
                if raw is None:
                    raise ValueError(f"longer than {MAX_LINE_BYTES // 2**20} MiB")
                text = _decode(raw)
                yield _from_json(text, index, line) if jsonl else Prompt(index, line, text=text)
            except (ValueError, RecursionError) as error:
                yield Prompt(index, line, error=f"line {line}: {error}")


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}") from error


def _from_json(text: str, index: int, line: int) -> Prompt:
    """A line of JSONL; ValueError with the reason when it cannot be used."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(value, dict):
        raise ValueError('not a JSON object; expected {"prompt": "..."} or {"messages": [...]}')
    prompt_id = value.pop("id", None)
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, str | int | None):
        prompt_id = json.dumps(prompt_id)
    try:
        return _prompt_of(value, index, line, prompt_id)
    except ValueError as error:
        return Prompt(index, line, id=prompt_id, error=f"line {line}: {error}")


def _prompt_of(value: dict[str, Any], index: int, line: int, prompt_id: str | int | None) -> Prompt:
    given = [key for key in _CONTENT if value.get(key) is not None]
    if len(given) != 1:
        what = " and ".join(given) + " together" if given else "none of them"
        raise ValueError(f"needs exactly one of {', '.join(_CONTENT)}; it has {what}")
    content = {key: value.pop(key, None) for key in _CONTENT}
    if content["prompt"] is not None and not isinstance(content["prompt"], str):
        raise ValueError("prompt must be a string")
    if content["messages"] is not None:
        _check_messages(content["messages"])
    if content["prompt_token_ids"] is not None:
        _check_ids("prompt_token_ids", content["prompt_token_ids"])
    parameters, unknown = {}, []
    for key, item in value.items():
        if key in _PARAMETERS and item is not None:
            parameters[key] = _checked_parameter(key, item)
        elif key in _UNSUPPORTED and item is not None:
            raise ValueError(f"{key} is not supported")
        elif key not in _PARAMETERS and key not in _UNSUPPORTED:
            unknown.append(key)
    return Prompt(
        index,
        line,
        text=content["prompt"],
        messages=content["messages"],
        token_ids=content["prompt_token_ids"],
        id=prompt_id,
        parameters=parameters,
        unknown_keys=tuple(unknown),
    )


def _checked_parameter(key: str, value: Any) -> Any:
    types, expected = _PARAMETERS[key]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ValueError(f"{key} must be {expected}, not {json.dumps(value)}")
    if key == "stop_token_ids":
        return _check_ids(key, value)
    return value


def _check_ids(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        raise ValueError(f"{key} must be a list of integers")
    return tuple(value)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    for place, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'message {place} must be an object with "role" and "content"')


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
