"""Tokens that tokenizer.json does not hold, or holds with other flags. The oracle is transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import BOS, EOS, EOT, PAD, edit_json, write_byte_tokenizer

from tinyvllm_cli.errors import UserError
from tinyvllm_cli.text.tokenizer import Tokenizer


def test_tokens_that_only_the_config_knows(tmp_path: Path) -> None:
    """As in transformers: they are tokens, and not spelled out letter by letter."""
    from transformers import AutoTokenizer

    flags = {"special": True, "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    for config in (
        {"added_tokens_decoder": {"258": {"content": "<eot>", **flags}}},
        {"additional_special_tokens": ["<eot>"]},
        {"additional_special_tokens": [{"__type": "AddedToken", "content": "<eot>", **flags}]},
        {"extra_special_tokens": {"turn_token": "<eot>"}},
        {"bos_token": "<eot>"},
        {},
    ):
        path = write_byte_tokenizer(tmp_path) / "tokenizer.json"
        kept = [token for token in json.loads(path.read_text())["added_tokens"] if token["id"] < EOT]
        edit_json(path, added_tokens=kept)
        edit_json(tmp_path / "tokenizer_config.json", **config)
        text = "a <eot>b<pad>c"
        for special in (True, False):
            expected = AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=special)["input_ids"]
            assert Tokenizer.from_folder(tmp_path).encode(text, special) == expected


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "normalized", "single_word"])
def test_flags_of_the_config_go_before_those_of_the_tokenizer(tmp_path: Path, flag: str) -> None:
    """As in transformers. A token is found in upper case when it is looked for in normalized text."""
    from transformers import AutoTokenizer

    flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, flag: True}
    path = write_byte_tokenizer(tmp_path) / "tokenizer.json"
    edit_json(path, normalizer={"type": "Lowercase"})
    edit_json(tmp_path / "tokenizer_config.json", added_tokens_decoder={"258": {"content": "<eot>", **flags}})
    text = "a <eot> b<eot>c<EOT>"
    expected = AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    assert Tokenizer.from_folder(tmp_path).encode(text, True) == expected
    edit_json(tmp_path / "tokenizer_config.json", added_tokens_decoder=...)
    assert Tokenizer.from_folder(tmp_path).encode(text, True) != expected


def test_named_tokens_are_special(tmp_path: Path) -> None:
    """Whatever tokenizer.json says: they are not shown."""
    path = write_byte_tokenizer(tmp_path) / "tokenizer.json"
    edit_json(path, added_tokens=[token | {"special": False} for token in json.loads(path.read_text())["added_tokens"]])
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode([BOS, ord("a"), EOT, EOS, PAD]) == "a<eot>"
    write_byte_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", added_tokens_decoder={"258": {"content": "<eot>", "special": False}})
    assert Tokenizer.from_folder(tmp_path).decode([ord("a"), EOT]) == "a"  # neither does the other file undo it


@pytest.mark.parametrize(
    ("name", "content"),
    [("added_tokens.json", {"<eot>": 258}), ("special_tokens_map.json", {"additional_special_tokens": ["<eot>"]})],
)
def test_tokens_that_only_an_older_file_knows(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    path = write_byte_tokenizer(tmp_path) / "tokenizer.json"
    tokens = json.loads(path.read_text())["added_tokens"]
    edit_json(path, added_tokens=[token for token in tokens if token["id"] < EOT])
    (tmp_path / name).write_text(json.dumps(content))
    expected = AutoTokenizer.from_pretrained(tmp_path)("a <eot>b")["input_ids"]
    assert Tokenizer.from_folder(tmp_path).encode("a <eot>b", True) == expected
    edit_json(path, added_tokens=[token | {"content": f"{token['content']}!"} for token in tokens])
    if name == "added_tokens.json":
        with pytest.raises(UserError, match=r"added_tokens\.json: token '<eot>' has id 258 here"):
            Tokenizer.from_folder(tmp_path)


def test_special_tokens_of_an_older_file_are_not_shown(tmp_path: Path) -> None:
    path = write_byte_tokenizer(tmp_path) / "tokenizer_config.json"
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<a>": 260, "<b>": 261}))
    edit_json(path, additional_special_tokens=["<b>", ["<c>"], {"content": 5}])
    assert Tokenizer.from_folder(tmp_path).decode([260, 261]) == "<a>"


def test_two_ids_for_a_token_are_refused(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", added_tokens_decoder={"9": {"content": "<eot>"}, "x": 1})
    with pytest.raises(UserError, match="'<eot>' has id 9 here and 258"):
        Tokenizer.from_folder(tmp_path)


def test_a_token_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, eos="\ud800")
    with pytest.raises(UserError, match="a token is no text"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("split", [True, False])
def test_names_of_tokens_may_stay_text(tmp_path: Path, split: bool) -> None:
    from transformers import AutoTokenizer

    write_byte_tokenizer(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", split_special_tokens=split)
    expected = AutoTokenizer.from_pretrained(tmp_path)("a<eot>b")["input_ids"]
    assert (EOT in expected) == (not split)
    assert Tokenizer.from_folder(tmp_path).encode("a<eot>b", True) == expected
