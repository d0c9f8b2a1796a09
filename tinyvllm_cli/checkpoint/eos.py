"""Which tokens end a sequence: the union of what config.json, generation_config.json and the tokenizer's files say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinyvllm_cli.checkpoint.faults import Fault, is_token_id, quote
from tinyvllm_cli.checkpoint.json_file import read_json


def eos_token_ids(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> tuple[tuple[int, ...], list[Fault]]:
    """The ids, ascending, and faults of the files that name them."""
    found: set[int] = set()
    faults: list[Fault] = []
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        value = content.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if all(is_token_id(token) for token in ids):
            found.update(ids)
        else:
            what = f"eos_token_id is {quote(value)}; it must be a token id or a list of them"
            faults.append(Fault(quote(str(folder / name), 4096), what))
    token_id, more = _tokenizer_eos(folder)
    if token_id is not None:
        found.add(token_id)
    return tuple(sorted(found)), faults + more


def _tokenizer_eos(folder: Path) -> tuple[int | None, list[Fault]]:
    """The id of the eos_token that tokenizer_config.json, or else special_tokens_map.json, names."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if not path.exists():
            continue
        content, faults = read_json(path)
        if faults:
            return None, faults
        token = content.get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            continue
        if not isinstance(token, str):
            return None, [Fault(quote(str(path), 4096), f"eos_token is {quote(token)}; it must be a token's text")]
        token_id = _listed(content.get("added_tokens_decoder"), token)
        return (token_id, []) if token_id is not None else _look_up(folder / "tokenizer.json", token)
    return None, []


def _listed(decoder: Any, token: str) -> int | None:
    """The id in an `added_tokens_decoder`, {"2": {"content": "</s>", ...}, ...}."""
    for key, entry in decoder.items() if isinstance(decoder, dict) else ():
        if (
            isinstance(entry, dict)
            and entry.get("content") == token
            and len(key) < 10
            and key.isascii()
            and key.isdigit()
        ):
            return int(key)
    return None


def _look_up(path: Path, token: str) -> tuple[int | None, list[Fault]]:
    """The id in tokenizer.json: among the added tokens, which stand in front, or in the vocabulary behind them.

    The file may have many megabytes; the front can be read without parsing all of it.
    """
    if not path.exists():
        return None, []
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        start = text.index('"added_tokens"')
        added = json.JSONDecoder().raw_decode(text, text.index("[", start))[0]
    except (OSError, ValueError, RecursionError):
        added = []  # the full parse below says what is wrong
    for entry in added:
        if isinstance(entry, dict) and entry.get("content") == token and is_token_id(entry.get("id")):
            return int(entry["id"]), []
    content, faults = read_json(path)
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # of a Unigram model: [["<unk>", 0.0], ...]
        vocab = {entry[0]: i for i, entry in enumerate(vocab) if isinstance(entry, list) and entry[:1] == [token]}
    token_id = vocab.get(token) if isinstance(vocab, dict) else None
    return (token_id if is_token_id(token_id) else None), faults
