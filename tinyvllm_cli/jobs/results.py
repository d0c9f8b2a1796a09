"""What a job writes: one record a prompt, a plain JSON object, in the order of the input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tinyvllm_cli.jobs.prompts import Prompt

Record = dict[str, Any]


def success_record(
    prompt: Prompt,
    *,
    prompt_token_ids: Sequence[int],
    text: str,
    token_ids: Sequence[int],
    finish_reason: str,
    first_token_s: float,
    total_s: float,
) -> Record:
    """The record of an answer.

    Args:
        prompt: what was asked.
        prompt_token_ids: what the model saw: template, BOS and all.
        text: the answer without special and stop tokens.
        token_ids: the tokens generated, including the one that stopped it.
        finish_reason: "stop" or "length".
        first_token_s, total_s: seconds from submission to the first token, and to the last.
    """
    return {
        **_head(prompt),
        "prompt_token_ids": list(prompt_token_ids),
        "text": text,
        "token_ids": list(token_ids),
        "finish_reason": finish_reason,
        "usage": {
            "prompt_tokens": len(prompt_token_ids),
            "completion_tokens": len(token_ids),
            "total_tokens": len(prompt_token_ids) + len(token_ids),
        },
        "timing": {"first_token_s": round(first_token_s, 6), "total_s": round(total_s, 6)},
    }


def error_record(prompt: Prompt, message: str) -> Record:
    """The record of a prompt without an answer."""
    return {**_head(prompt), "error": message}


def _head(prompt: Prompt) -> Record:
    head: Record = {"index": prompt.index}
    if prompt.id is not None:
        head["id"] = prompt.id
    if prompt.line:
        head["line"] = prompt.line
    head["prompt"] = prompt.text
    if prompt.messages is not None:
        head["messages"] = list(prompt.messages)
    return head


class InOrder:
    """Hands records on in the order of the input, each as soon as all before it are there.

    Args:
        emit: called with each prompt and its record.
    """

    def __init__(self, emit: Callable[[Prompt, Record], None]) -> None:
        self._emit = emit
        self._next = 0
        self._early: dict[int, tuple[Prompt, Record]] = {}

    def add(self, prompt: Prompt, record: Record) -> None:
        """Takes the record of any prompt, once."""
        self._early[prompt.index] = (prompt, record)
        while self._next in self._early:
            ready = self._early.pop(self._next)
            self._next += 1
            self._emit(*ready)

    def close(self) -> None:
        """Hands on what still waits for a prompt that will have no record, after an interruption."""
        for index in sorted(self._early):
            self._emit(*self._early.pop(index))
