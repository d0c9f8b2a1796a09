"""How `generate` looks: the answers on stdout, the rest on stderr."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tinyvllm_cli.render.console import Console, one_line

if TYPE_CHECKING:
    from tinyvllm_cli.commands.generate import GenerateResult
    from tinyvllm_cli.jobs.prompts import Prompt, PromptSource
    from tinyvllm_cli.jobs.results import Record

_BAR_CELLS = 16
_REDRAW_S = 0.1
_MAX_ERRORS_SHOWN = 10


class GenerateView:
    """The sink of `commands.generate`.

    As JSON, each record is a line of its own. For people, a single answer stands alone, and several stand below their
    prompts; `stream` shows them as they come, one after the other, with the very same bytes in the end.

    Args:
        console: where it goes.
        stream: True or False; None streams a single prompt on a terminal.
    """

    def __init__(self, console: Console, stream: bool | None = None) -> None:
        self.streams = False
        self._console = console
        self._stream = stream
        self._is_json = console.mode == "json"
        self._single = True
        self._next = 0  # index of the prompt whose turn it is
        self._is_open = False  # whether its answer has begun
        self._early: dict[int, tuple[Prompt, list[str]]] = {}  # text of prompts whose turn comes later
        self._drawn = 0.0
        self._errors_shown = 0

    def note(self, text: str) -> None:
        self._console.note(text)

    def warn(self, text: str) -> None:
        self._console.warn(text)

    def loading(self, text: str) -> None:
        self._console.status(f"{text} ...")

    def start(self, source: PromptSource) -> None:
        self._console.status("")
        self._single = source.is_single
        wanted = self._single and self._console.out_is_terminal if self._stream is None else self._stream
        self.streams = wanted and not self._is_json

    def text(self, prompt: Prompt, text: str) -> None:
        if prompt.index != self._next:
            self._early.setdefault(prompt.index, (prompt, []))[1].append(text)
            return
        if not self._is_open:
            self._open(prompt)
        self._console.write(text)

    def record(self, prompt: Prompt, record: Record) -> None:
        if "error" in record and (self._is_json or self._single or not self._console.out_is_terminal):
            self._error(prompt, record["error"])
        if self._is_json:
            self._console.json(record)
            return
        self._early.pop(prompt.index, None)
        if self._is_open and prompt.index == self._next:
            self._console.write("\n")
        elif "text" in record:
            self._open(prompt)
            self._console.write(record["text"] + "\n")
        elif not self._single:
            self._open(prompt)
            self._console.write(f"(no answer: {one_line(record['error'])})\n")
        self._next, self._is_open = prompt.index + 1, False
        if self._next in self._early:
            following, texts = self._early.pop(self._next)
            self.text(following, "".join(texts))

    def progress(self, state: GenerateResult) -> None:
        if self.streams or not self._console.err_is_terminal:
            return
        now = time.monotonic()
        if now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._console.status(_progress_line(state))

    def finish(self, result: GenerateResult) -> None:
        self._console.status("")
        if self._is_open:  # interrupted in the middle of a line
            self._console.write("\n")
        if self._errors_shown > _MAX_ERRORS_SHOWN:
            self._console.note(f"... and {self._errors_shown - _MAX_ERRORS_SHOWN} more errors")
        self._console.note(statistics_line(result))

    def _open(self, prompt: Prompt) -> None:
        """Begins a prompt's answer; ends the line of one that was interrupted."""
        if self._is_open:
            self._console.write("\n")
        if not self._single:
            self._console.heading("> " + one_line(prompt.title), blank_before=prompt.index > 0)
        self._is_open = True

    def _error(self, prompt: Prompt, message: str) -> None:
        self._errors_shown += 1
        if self._errors_shown <= _MAX_ERRORS_SHOWN:
            where = "" if self._single or message.startswith("line ") else f"prompt {prompt.index + 1}: "
            self._console.error(where + message)


def statistics_line(result: GenerateResult) -> str:
    """The last line on stderr."""
    done = result.num_records - result.num_errors
    parts = []
    if result.interrupted:
        of = "" if result.total is None else f" of {result.total}"
        parts.append(f"interrupted: {done}{of} answered")
    else:
        parts.append(_count(done, "answer"))
    if result.num_errors:
        parts.append(_count(result.num_errors, "error"))
    rate = result.output_tokens / result.generate_s if result.generate_s > 0 else 0.0
    parts.append(f"{result.prompt_tokens:,} tokens in, {result.output_tokens:,} out")
    parts.append(f"{rate:,.1f} tokens/s")
    parts.append(f"loaded in {result.load_s:.1f} s, generated in {result.generate_s:.1f} s")
    parts.append(f"{result.device} {result.dtype}")
    return " · ".join(parts)


def _progress_line(state: GenerateResult) -> str:
    rate = state.output_tokens / state.generate_s if state.generate_s > 0 else 0.0
    if state.total:
        share = state.num_records / state.total
        filled = round(share * _BAR_CELLS)
        bar = "█" * filled + "░" * (_BAR_CELLS - filled)
        left = f" · {_clock(state.generate_s * (1 - share) / share)} left" if share else ""
        return f"{bar} {state.num_records}/{state.total} · {rate:,.0f} tokens/s{left}"
    return f"{state.num_records} done · {rate:,.0f} tokens/s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
