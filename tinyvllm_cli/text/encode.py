"""A prompt in any of its forms to the token ids that the model sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinyvllm_cli.errors import UserError
from tinyvllm_cli.text.chat import ChatTemplate
from tinyvllm_cli.text.tokenizer import Tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text to be continued, with what the tokenizer puts around it."""
    return tokenizer.encode(text, add_special_tokens=True)


def encode_chat(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """A conversation, and the opening of its answer, as the model's template writes them."""
    return tokenizer.encode(template.render(messages), add_special_tokens=False)


def check_ids(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ids; UserError when there are none, or one that the model does not know."""
    if not token_ids:
        raise UserError("the prompt is empty: it has no token")
    wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise UserError(f"token id {wrong} is outside of the model's vocabulary of {vocab_size}")
    return list(token_ids)
