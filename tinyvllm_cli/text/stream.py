"""Token ids to text, one at a time, never cutting a character."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from tinyvllm_cli.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Turns the tokens of one sequence into text as they come, at a cost per token that does not grow.

    Everything that `push` and the final `flush` return, joined, is `tokenizer.decode` of all the tokens.

    Args:
        tokenizer: whose token ids these are.
        hidden_ids: ids without text, beside the tokenizer's special tokens (the model's EOS ids).
    """

    def __init__(self, tokenizer: Tokenizer, hidden_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids.union(hidden_ids)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """The characters that are complete with this token; "" while one is still in pieces."""
        if token_id in self._hidden:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            data = data.removeprefix(b" ")
            self._at_start = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else ""."""
        return self._utf8.decode(b"", final=True)
