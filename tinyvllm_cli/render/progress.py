"""How far a job is, in one line: for a terminal, where it is drawn again and again, and for a log."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tinyvllm_cli.commands.generate import GenerateResult

_BAR_CELLS = 16
_WINDOW_S = 10.0
"""Token rates are those of the last so many seconds."""


class _Sample(NamedTuple):
    at: float
    tokens_in: int
    tokens_out: int


class Progress:
    """Keeps the last seconds of a job, to tell its present speed."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque([_Sample(0.0, 0, 0)])

    def line(self, state: GenerateResult, bar: bool) -> str:
        """The state in words, what matters most first; with `bar` for a terminal."""
        now = _Sample(state.generate_s, state.prompt_tokens, state.output_tokens)
        while len(self._samples) > 1 and self._samples[1].at <= now.at - _WINDOW_S:
            self._samples.popleft()
        before = self._samples[0]
        self._samples.append(now)
        seconds = max(now.at - before.at, 1e-3)
        parts = [_done(state, bar)]
        left = _seconds_left(state)
        if left is not None:
            parts.append(f"{clock(left)} left")
        parts.append(f"{(now.tokens_out - before.tokens_out) / seconds:,.0f} tokens/s out")
        parts.append(f"{(now.tokens_in - before.tokens_in) / seconds:,.0f} in")
        parts.append(f"{state.num_running} running, {state.num_waiting} waiting")
        parts.append(f"KV cache {state.kv_use:.0%}")
        if state.num_errors:
            parts.append(count(state.num_errors, "error"))
        return " · ".join(parts)


def _done(state: GenerateResult, bar: bool) -> str:
    if not state.total:
        return f"{state.num_records:,} done"
    text = f"{state.num_records:,}/{state.total:,}"
    if not bar:
        return text + " done"
    filled = _BAR_CELLS * state.num_records // state.total
    return "█" * filled + "░" * (_BAR_CELLS - filled) + " " + text


def _seconds_left(state: GenerateResult) -> float | None:
    made = state.num_records - state.num_resumed
    if not state.total or not made:
        return None
    return state.generate_s * (state.total - state.num_records) / made


def count(number: int, noun: str) -> str:
    """ "1 error", "2 errors"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def clock(seconds: float) -> str:
    """ "0:06", "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
