"""The one output sink: data on stdout, everything else on stderr, in the modes human, json and quiet."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

from tinyvllm_cli.errors import UserError
from tinyvllm_cli.jobs.json_line import dump_json

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

Mode = Literal["human", "json", "quiet"]

_BOLD, _DIM, _RED, _YELLOW, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[33m", "\x1b[0m"
_CLEAR_LINE = "\r\x1b[2K"


def printable(text: str, keep: str = "\n\t") -> str:
    """`text` with control characters and lone surrogates as escapes (\\x1b, \\ud800), but those in `keep` as they are.

    Names and model output can then neither move the cursor nor break an encoder.
    """
    if text.isprintable():
        return text
    return "".join(char if char in keep or not _is_control(ord(char)) else _escape(char) for char in text)


def _is_control(code: int) -> bool:
    bidi = 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
    return code < 0x20 or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or bidi


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def one_line(text: str, limit: int = 0) -> str:
    """`text` on one line, without control characters; cut to `limit` characters when that is not 0."""
    line = printable(text, keep="")
    return line if not limit or len(line) <= limit else line[: max(limit - 1, 0)] + "…"


class Console:
    """Where a command's output goes.

    Args:
        mode: "human" shows everything; "json" has JSON on stdout and the same notes on stderr; "quiet" leaves only data
            and errors.
        quiet: drop notes, warnings and progress in any mode.
        out: the data stream. Bytes written to it are UTF-8 whatever the locale says.
        err: the stream of notes, warnings, progress and errors.
    """

    def __init__(
        self, mode: Mode = "human", *, quiet: bool = False, out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self.mode = mode
        self.quiet = quiet or mode == "quiet"
        self._closed = out is None and sys.stdout is None
        self._out = out or sys.stdout or _nowhere()
        self._err = err or sys.stderr or _nowhere()
        for stream in (self._out, self._err):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        self.out_is_terminal = self._out.isatty()
        self.err_is_terminal = self._err.isatty() and os.environ.get("TERM") != "dumb"
        self._color = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._status = ""

    # Data

    def write(self, text: str) -> None:
        """Writes `text` to stdout at once; on a terminal control characters are shown as escapes.

        UserError when it is closed, the disk is full or the like; BrokenPipeError when the reader has gone.
        """
        self._emit(printable(text) if self.out_is_terminal else text)

    def json(self, value: Any) -> None:
        """Writes `value` as one line of JSON to stdout."""
        self._emit(dump_json(value) + "\n")

    def heading(self, text: str, blank_before: bool = False) -> None:
        """Writes a heading line to stdout, bold on a terminal, after a blank line if so wanted."""
        line = printable(text, keep="")
        if self.out_is_terminal and self._color:
            line = f"{_BOLD}{line}{_RESET}"
        self._emit(("\n" if blank_before else "") + line + "\n")

    def _emit(self, text: str) -> None:
        self._hide_status()
        self._require_open()
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(f"the output cannot be written: {error.strerror}", fix="Is the disk full?") from error

    def _require_open(self) -> None:
        if self._closed:
            raise UserError("standard output is closed", fix="Leave it open, or send it to /dev/null.")

    def rich(self) -> RichConsole:
        """A Rich console on stdout for tables; markup, emoji codes and highlighting of data are off.

        Where there is no terminal whose width counts, rows are as long as they need to be.
        """
        from rich.console import Console as RichConsole

        class Rich(RichConsole):
            def on_broken_pipe(self) -> None:
                raise  # the BrokenPipeError that is being handled, in place of rich's exit code

        self._hide_status()
        self._require_open()
        width = None if self.out_is_terminal else 1000
        return Rich(file=self._out, width=width, markup=False, emoji=False, highlight=False)

    # Everything else

    def note(self, text: str) -> None:
        """A line on stderr for people; nothing in quiet mode."""
        if not self.quiet:
            self._say(printable(text), _DIM)

    def warn(self, text: str) -> None:
        """A warning on stderr; nothing in quiet mode."""
        if not self.quiet:
            self._say(f"warning: {printable(text)}", _YELLOW)

    def error(self, error: UserError | str) -> None:
        """An error on stderr, in every mode: where and what, then in a second line what to do."""
        self._say(f"error: {printable(str(error))}", _RED)

    def status(self, text: str) -> None:
        """Shows one line of progress at the bottom of the terminal, in place of the last; "" removes it.

        Nothing is shown when stderr is no terminal, in quiet mode, or while half a line stands on a terminal's stdout.
        """
        if not self.err_is_terminal or self.quiet:
            return
        width = _terminal_width(self._err)
        self._hide_status()
        self._status = one_line(text, width - 1)
        if self._status:
            self._to_err(f"{_DIM}{self._status}{_RESET}" if self._color else self._status)

    def _hide_status(self) -> None:
        if self._status:
            self._to_err(_CLEAR_LINE)
            self._status = ""

    def _say(self, text: str, style: str) -> None:
        self._hide_status()
        colored = self.err_is_terminal and self._color
        self._to_err(f"{style}{text}{_RESET}\n" if colored else text + "\n")

    def _to_err(self, text: str) -> None:
        with suppress(OSError):  # a log whose disk is full or whose reader has gone ends no job
            self._err.write(text)
            self._err.flush()


def _nowhere() -> TextIO:
    """In place of a standard stream that the caller has closed, which Python shows as None."""
    return open(os.devnull, "w")


def _terminal_width(stream: TextIO) -> int:
    """Columns of the terminal behind `stream`, 80 when it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
