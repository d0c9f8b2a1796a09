"""Tokenizer, streaming decoder and chat templates. The oracle is the tokenizers library's own decoding."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from models import BOS, BYTE_VOCAB_SIZE, CHAT_TEMPLATE, EOS, EOT, edit_json, write_byte_tokenizer
from tokenizers import decoders, normalizers, processors
from tokenizers import models as token_models

from tinyvllm_cli.checkpoint.eos import eos_token_ids
from tinyvllm_cli.errors import UserError
from tinyvllm_cli.text.chat import ChatTemplate
from tinyvllm_cli.text.stream import IncrementalDecoder
from tinyvllm_cli.text.tokenizer import Tokenizer

HELLO = "é世👋"


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("byte"), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def byte_tokenizer(byte_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(byte_folder)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer in the manner of Llama 2: spaces are ▁, one in front, unknown characters fall back to bytes."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for char in "▁abcé":
        vocab[char] = len(vocab)
    vocab["▁a"] = len(vocab)
    backend = tokenizers.Tokenizer(
        token_models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    return Tokenizer.from_folder(folder)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


def test_special_tokens_are_known(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.vocab_size == BYTE_VOCAB_SIZE
    assert (byte_tokenizer.bos_token, byte_tokenizer.bos_token_id) == ("<bos>", BOS)
    assert (byte_tokenizer.eos_token, byte_tokenizer.eos_token_id) == ("<eos>", EOS)


def test_special_token_may_be_an_object(sentencepiece: Tokenizer) -> None:
    assert (sentencepiece.bos_token, sentencepiece.bos_token_id) == ("<s>", 1)


def test_special_tokens_map_fills_gaps(tmp_path: Path) -> None:
    edit_json(
        write_byte_tokenizer(tmp_path, eos=None) / "special_tokens_map.json", eos_token="<eot>", bos_token="<pad>"
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (EOT, BOS)


@given(data=st.binary(max_size=40))
@settings(deadline=None)
def test_byte_level_decoding_is_that_of_the_library(byte_tokenizer: Tokenizer, data: bytes) -> None:
    ids = list(data)
    expected = byte_tokenizer._backend.decode(ids)
    assert byte_tokenizer.decode(ids) == expected == data.decode(errors="replace")
    assert "".join(stream(byte_tokenizer, ids)) == expected


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
@settings(deadline=None)
def test_text_survives(byte_tokenizer: Tokenizer, sentencepiece: Tokenizer, text: str) -> None:
    ids = byte_tokenizer.encode(text, add_special_tokens=False)
    assert byte_tokenizer.decode(ids) == text
    pieces = stream(byte_tokenizer, ids)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    other = sentencepiece.encode(text, add_special_tokens=True)
    expected = sentencepiece._backend.decode(other)
    assert sentencepiece.decode(other) == expected
    assert "".join(stream(sentencepiece, other)) == expected


def test_sentencepiece_drops_the_first_space_only(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode(" a ab", add_special_tokens=False)
    assert (
        "".join(stream(sentencepiece, ids))
        == sentencepiece.decode(ids)
        == sentencepiece._backend.decode(ids)
        == " a ab"
    )


def test_characters_come_whole_and_once(byte_tokenizer: Tokenizer) -> None:
    """C10 without a model."""
    ids = list(HELLO.encode())
    assert [piece for piece in stream(byte_tokenizer, ids) if piece] == ["é", "世", "👋"]
    for cut in range(len(ids)):
        pieces = stream(byte_tokenizer, ids[:cut])
        whole = ids[:cut] and bytes(ids[:cut]).decode(errors="ignore")
        assert "".join(pieces[:-1]) == (whole or "")
        assert "".join(pieces) == byte_tokenizer.decode(ids[:cut])
        assert pieces[-1] in ("", "\ufffd")


def test_hidden_and_special_tokens_have_no_text(byte_tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(byte_tokenizer, hidden_ids=(ord("B"),))
    ids = [BOS, ord("A"), EOT, ord("B"), ord("C"), 100_000]
    assert "".join(decoder.push(token) for token in ids) == "AC" == byte_tokenizer.decode(ids, hidden_ids=(ord("B"),))


@pytest.mark.parametrize(("add_bos", "bos_count"), [(True, 1), (False, 0)])
def test_one_bos_raw(tmp_path: Path, add_bos: bool, bos_count: int) -> None:
    """C04 b, c, d: one BOS in front of a raw text, and a BOS that is typed is not doubled."""
    tokenizer = Tokenizer.from_folder(write_byte_tokenizer(tmp_path, add_bos=add_bos))
    assert tokenizer.encode("A", add_special_tokens=True) == [BOS] * bos_count + [ord("A")]
    assert tokenizer.encode("<bos>A", add_special_tokens=True) == [BOS, ord("A")]
    assert tokenizer.encode("A", add_special_tokens=False) == [ord("A")]


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_add_bos_token_decides(tmp_path: Path, automatic: bool, wanted: bool) -> None:
    edit_json(write_byte_tokenizer(tmp_path, add_bos=automatic) / "tokenizer_config.json", add_bos_token=wanted)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("A", add_special_tokens=True) == [BOS] * wanted + [ord("A")]
    assert tokenizer.encode("<bos>A", add_special_tokens=True) == [BOS, ord("A")]


@pytest.mark.parametrize("add_bos", [True, False])
def test_one_bos_in_chat(tmp_path: Path, add_bos: bool) -> None:
    """C04 a, d."""
    folder = write_byte_tokenizer(tmp_path, add_bos=add_bos, chat_template=CHAT_TEMPLATE)
    template, tokenizer = ChatTemplate.from_folder(folder), Tokenizer.from_folder(folder)
    assert template is not None
    text = template.render([{"role": "user", "content": "A"}])
    assert text == "<bos>[user]A<eot>[assistant]"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(BOS) == 1
    assert ids[0] == BOS


def test_truncation_of_the_file_is_ignored(tmp_path: Path) -> None:
    path = write_byte_tokenizer(tmp_path) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=200)
    backend.save(str(path))
    assert len(Tokenizer.from_folder(tmp_path).encode("A" * 100, add_special_tokens=False)) == 100


def test_half_a_surrogate_pair_is_refused(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="surrogate"):
        byte_tokenizer.encode("a\ud800", add_special_tokens=True)


def test_faults_of_the_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "tokenizer.json" in str(caught.value)
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "tokenizer_config.json" in str(caught.value)


def test_a_pipe_is_no_tokenizer(tmp_path: Path) -> None:
    edit_json(tmp_path / "tokenizer_config.json", eos_token="<eos>")
    os.mkfifo(tmp_path / "tokenizer.json")
    _, faults = eos_token_ids(tmp_path, {}, {})
    assert [fault.what for fault in faults] == ["is not a file"]


def test_unknown_decoder_is_refused(tmp_path: Path) -> None:
    path = write_byte_tokenizer(tmp_path) / "tokenizer.json"
    edit_json(path, decoder={"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True})
    with pytest.raises(UserError, match="CTC"):
        Tokenizer.from_folder(tmp_path)


def test_template_sources(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(write_byte_tokenizer(tmp_path)) is None
    write_byte_tokenizer(
        tmp_path, chat_template=[{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    )
    assert rendered(tmp_path) == "D"
    edit_json(tmp_path / "tokenizer_config.json", chat_template={"rag": "R", "default": "E"})
    assert rendered(tmp_path) == "E"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert rendered(tmp_path) == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert rendered(tmp_path) == "F"
    (tmp_path / "chat_template.jinja").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="Git LFS pointer"):
        rendered(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"chat_template\.json"):
        rendered(tmp_path)


def rendered(folder: Path) -> str:
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    return template.render([{"role": "user", "content": "x"}])


def test_named_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, chat_template=[{"name": "rag", "template": "R"}])
    with pytest.raises(UserError, match="rag"):
        ChatTemplate.from_folder(tmp_path)


def test_what_templates_may_use() -> None:
    source = """
    {%- for m in messages %}
        {%- if m.role == "skip" %}{% continue %}{% endif %}
        {%- generation %}{{ m | tojson }}{% endgeneration %}
    {%- endfor %}{{ strftime_now("%Y") | length }}{{ bos_token }}{{ tools is none }}
    """
    messages = [{"role": "skip", "content": ""}, {"role": "user", "content": "<é>"}]
    text = ChatTemplate(source, {"bos_token": "<s>"}).render(messages)
    assert text.strip() == '{"role": "user", "content": "<é>"}4<s>True'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "not safely callable|not callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[9].content }}", "undefined|no element"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_what_templates_may_not_do(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_syntax_error_names_line_and_file() -> None:
    with pytest.raises(UserError, match="line 2") as caught:
        ChatTemplate("a\n{% if %}", {}, where="some/chat_template.jinja")
    assert "some/chat_template.jinja" in str(caught.value)
    with pytest.raises(UserError, match="statically nested"):
        ChatTemplate("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, {})
