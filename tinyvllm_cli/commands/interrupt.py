"""What Ctrl-C and SIGTERM do: before there is anything to keep, and while records are being made."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any

from tinyvllm_cli.errors import ExitCode

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def leaving_at_once(say: Callable[[], None]) -> Iterator[None]:
    """While entered, Ctrl-C and SIGTERM call `say` and end the process with exit code 130, without a KeyboardInterrupt.

    For the time in which there is nothing to keep: libraries that are being imported turn the exception into others.
    """

    def leave(signum: int = 0, frame: FrameType | None = None) -> None:
        with suppress(RuntimeError, OSError):  # the signal may have come while stderr was being written
            say()
        os._exit(ExitCode.INTERRUPTED)

    with _handling(leave):
        try:
            yield
        except KeyboardInterrupt:  # of `unwinding`
            leave()


def unwinding() -> AbstractContextManager[None]:
    """While entered, inside `leaving_at_once`, temporary folders are removed before the process ends."""
    return _handling(signal.default_int_handler)


@contextmanager
def _handling(handler: Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {signum: signal.signal(signum, handler) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


class Interrupts:
    """Ctrl-C and SIGTERM as KeyboardInterrupt, but never in the middle of writing a record.

    While entered, the first signal raises KeyboardInterrupt inside `allowed` blocks, at once or at the next one.

    A second signal leaves the process at once. Outside of the main thread, where Python allows no handlers, it does
    nothing.
    """

    def __init__(self) -> None:
        self._pending = False
        self._open = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Where an interruption does no harm: waiting for input, computing a step."""
        self._open = True
        try:
            if self._pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._open = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._pending:
            os._exit(ExitCode.INTERRUPTED)
        self._pending = True
        if self._open:
            raise KeyboardInterrupt
