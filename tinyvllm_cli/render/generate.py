"""How `generate` looks: the answers on stdout, the rest on stderr."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tinyvllm_cli.jobs.results import error_message, is_error, texts_of
from tinyvllm_cli.render.console import Console, one_line
from tinyvllm_cli.render.progress import Progress, count
from tinyvllm_cli.render.table import table

if TYPE_CHECKING:
    from tinyvllm_cli.commands.generate import GenerateResult
    from tinyvllm_cli.jobs.lines import Prompt
    from tinyvllm_cli.jobs.prompts import PromptSource
    from tinyvllm_cli.jobs.results import Record

_REDRAW_S = 0.1
_LOG_S = 10.0
"""Between two lines of progress where they stay: in a log."""
_MAX_ERRORS_SHOWN = 10


class GenerateView:
    """The sink of `commands.generate`.

    As JSON, each record is a line of its own. For people, a single answer stands alone, and several stand below their
    prompts; `stream` shows them as they come, one after the other, with the very same bytes in the end. Records that
    are written to a file are not shown at all.

    Args:
        console: where it goes.
        stream: True or False; None streams a single prompt on a terminal.
        resume_command: what to type after an interruption.
    """

    def __init__(self, console: Console, stream: bool | None = None, resume_command: str = "") -> None:
        self.streams = False
        self._resume_command = resume_command
        self._to_file = False
        self._progress = Progress()
        self._console = console
        self._stream = stream
        self._is_json = console.mode == "json"
        self._single = True
        self._next = 0  # index of the prompt whose turn it is
        self._is_open = False  # whether its answer has begun
        self._early: dict[int, tuple[Prompt, list[str]]] = {}  # text of prompts whose turn comes later
        self._drawn = time.monotonic()
        self._errors_shown = 0

    def note(self, text: str) -> None:
        self._console.note(text)

    def warn(self, text: str) -> None:
        self._console.warn(text)

    def loading(self, text: str) -> None:
        self._console.status(f"{text} ...")

    def start(self, source: PromptSource, to_file: bool = False) -> None:
        self._console.status("")
        self._single = source.is_single
        self._to_file = to_file
        self._drawn = time.monotonic()
        wanted = self._single and self._console.out_is_terminal if self._stream is None else self._stream
        self.streams = wanted and not self._is_json and not to_file

    def text(self, prompt: Prompt, text: str) -> None:
        if prompt.index != self._next:
            self._early.setdefault(prompt.index, (prompt, []))[1].append(text)
            return
        if not self._is_open:
            self._open(prompt)
        self._console.write(text)

    def record(self, prompt: Prompt, record: Record) -> None:
        failed = is_error(record)
        shown_below = not (self._is_json or self._to_file or self._single)
        if failed and not (shown_below and self._console.out_is_terminal):
            self._error(prompt, error_message(record))
        if self._to_file:
            return
        if self._is_json:
            self._console.json(record)
            return
        self._early.pop(prompt.index, None)
        if self._is_open and prompt.index == self._next:
            self._console.write("\n")
        elif not failed:
            self._open(prompt)
            self._console.write(_block(texts_of(record)))
        elif not self._single:
            self._open(prompt)
            self._console.write(f"(no answer: {one_line(error_message(record))})\n")
        self._next, self._is_open = prompt.index + 1, False
        if self._next in self._early:
            following, texts = self._early.pop(self._next)
            self.text(following, "".join(texts))

    def progress(self, state: GenerateResult) -> None:
        if self.streams or (self._single and not self._console.err_is_terminal):
            return
        now = time.monotonic()
        if now - self._drawn >= (_REDRAW_S if self._console.err_is_terminal else _LOG_S):
            self._drawn = now
            if self._console.err_is_terminal:
                self._console.status(self._progress.line(state, bar=True))
            else:
                self._console.note(self._progress.line(state, bar=False))

    def finish(self, result: GenerateResult) -> None:
        self._console.status("")
        if self._is_open:  # interrupted in the middle of a line
            self._console.write("\n")
        if self._errors_shown > _MAX_ERRORS_SHOWN:
            self._console.note(f"... and {self._errors_shown - _MAX_ERRORS_SHOWN} more errors")
        self._console.note(statistics_line(result))
        if result.interrupted and result.can_resume and self._resume_command:
            self._console.note(f"to go on: {self._resume_command}")

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
            where = "" if self._single or message.startswith("line ") else f"{prompt.place}: "
            self._console.error(where + message)


class TableView(GenerateView):
    """The sink that shows all answers at once, in a table of prompts and answers."""

    def start(self, source: PromptSource, to_file: bool = False) -> None:
        super().start(source, to_file)
        self.streams = False
        self._rows: list[tuple[str, str]] = []

    def record(self, prompt: Prompt, record: Record) -> None:
        answer = f"(no answer: {error_message(record)})" if is_error(record) else " | ".join(texts_of(record))
        self._rows.append((one_line(prompt.title), one_line(answer)))

    def finish(self, result: GenerateResult) -> None:
        self._console.status("")
        answers = table("prompt", "answer")
        for row in self._rows:
            answers.add_row(*row)
        self._console.rich().print(answers)
        super().finish(result)


def _block(texts: list[str]) -> str:
    """One answer as it is, several with their numbers."""
    if len(texts) == 1:
        return texts[0] + "\n"
    return "".join(f"[{number}] {text}\n" for number, text in enumerate(texts, 1))


def statistics_line(result: GenerateResult) -> str:
    """The last line on stderr."""
    done = result.num_records - result.num_errors
    parts = []
    if result.interrupted:
        of = "" if result.total is None else f" of {result.total}"
        parts.append(f"interrupted: {done}{of} answered")
    else:
        parts.append(count(done, "answer"))
    if result.num_errors:
        parts.append(count(result.num_errors, "error"))
    if result.num_resumed:
        parts.append(f"{result.num_resumed:,} of them from before")
    if result.device:
        rate = result.output_tokens / result.generate_s if result.generate_s > 0 else 0.0
        cached = ""
        if result.cached_tokens:
            cached = f" ({result.cached_tokens:,} cached, {result.cached_tokens / result.prompt_tokens:.1%})"
        parts.append(f"{result.prompt_tokens:,} tokens in{cached}, {result.output_tokens:,} out")
        parts.append(f"{rate:,.1f} tokens/s")
        parts.append(f"loaded in {result.load_s:.1f} s, generated in {result.generate_s:.1f} s")
        parts.append(f"{result.device} {result.dtype}")
    if result.output:
        parts.append(f"in {one_line(result.output)}")
    return " · ".join(parts)
