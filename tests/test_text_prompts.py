"""Prompt sources and the order of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.errors import UserError
from tinyvllm_cli.jobs import prompts as prompts_module
from tinyvllm_cli.jobs.lines import Prompt
from tinyvllm_cli.jobs.prompts import from_arguments, from_file
from tinyvllm_cli.jobs.results import InOrder, error_record


def read(tmp_path: Path, content: bytes, name: str = "p.txt") -> list[Prompt]:
    path = tmp_path / name
    path.write_bytes(content)
    source = from_file(str(path))
    prompts = list(source)
    assert source.total == len(prompts)
    assert source.is_single == (len(prompts) == 1)
    return prompts


def read_json(tmp_path: Path, *lines: Any) -> list[Prompt]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return read(tmp_path, text.encode(), "p.jsonl")


@pytest.mark.parametrize(
    "content",
    [b"a\n b \nc", b"a\n b \nc\n", b"\xef\xbb\xbfa\r\n b \r\nc\r\n", b"\n\na\n   \n b \n\r\nc\n\n"],
    ids=["no last newline", "plain", "BOM and CRLF", "blank lines"],
)
def test_lines_of_a_text_file(tmp_path: Path, content: bytes) -> None:
    prompts = read(tmp_path, content)
    assert [prompt.text for prompt in prompts] == ["a", " b ", "c"]
    assert [prompt.index for prompt in prompts] == [0, 1, 2]


def test_line_numbers_count_blank_lines(tmp_path: Path) -> None:
    assert [prompt.line for prompt in read(tmp_path, b"\na\n\nb\n")] == [2, 4]


def test_only_newlines_end_lines(tmp_path: Path) -> None:
    text = "a\u2028b\x0bc\x0cd\x85e\rf"
    assert [prompt.text for prompt in read(tmp_path, text.encode() + b"\n")] == [text]


def test_a_line_that_is_not_utf8_is_an_error_in_its_place(tmp_path: Path) -> None:
    prompts = read(tmp_path, b"a\nb\xff\nc\n")
    assert [prompt.error for prompt in prompts] == ["", "line 2: not UTF-8: byte 0xff at column 2", ""]


def test_a_line_too_long_is_an_error_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "MAX_LINE_BYTES", 8)
    prompts = read(tmp_path, b"a\n" + b"x" * 30 + b"\nb\n" + b"y" * 20)
    assert [bool(prompt.error) for prompt in prompts] == [False, True, False, True]
    assert [prompt.line for prompt in prompts] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompt"),
        (b"\xef\xbb\xbf\r\n \n", "holds no prompt"),
        (b"\x7fELF\0\0\0", "binary"),
        ("Hallo".encode("utf-16"), "UTF-16"),
        (b"\x1f\x8b\x08\x00abc", "zcat"),
    ],
)
def test_files_without_prompts_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, content)
    assert message in str(caught.value)
    assert "p.txt" in str(caught.value)


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError) as caught:
        from_file(str(tmp_path / name))
    assert "cannot be read" in str(caught.value)


def test_arguments() -> None:
    assert [prompt.text for prompt in from_arguments(["a", "b\nc"])] == ["a", "b\nc"]
    with pytest.raises(UserError, match="prompt 2 is empty"):
        from_arguments(["a", ""])


def test_jsonl(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompts = read_json(
        tmp_path,
        {"prompt": "a", "id": "x", "max_tokens": 3, "temperature": 1, "top_p": None, "answer": "b"},
        {"messages": messages, "id": 7, "seed": 5},
        "",
        {"prompt_token_ids": [1, 2], "ignore_eos": True, "stop_token_ids": [9], "id": [1]},
        {"prompt": "", "n": None},
    )
    assert [prompt.error for prompt in prompts] == [""] * 4
    assert prompts[0].parameters == {"max_tokens": 3, "temperature": 1}
    assert prompts[0].unknown_keys == ("answer",)
    assert prompts[1].messages == messages
    assert [prompt.id for prompt in prompts] == ["x", 7, "[1]", None]
    assert prompts[2].token_ids == (1, 2)
    assert prompts[2].parameters == {"ignore_eos": True, "stop_token_ids": (9,)}
    assert [prompt.line for prompt in prompts] == [1, 2, 4, 5]
    assert [prompt.title for prompt in prompts] == ["a", "u", "2 token ids", ""]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "line 1"),
        ('{"prompt": "a", "temperature": NaN}', "NaN"),
        ({}, "exactly one of prompt, messages, prompt_token_ids"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt and messages together"),
        ({"prompt": 1}, "prompt must be a string"),
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "user"}]}, "message 1"),
        ({"prompt_token_ids": [1, "a"]}, "list of integers"),
        ({"prompt": "a", "max_tokens": "3"}, "max_tokens must be an integer"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens must be an integer"),
        ({"prompt": "a", "seed": 1.5}, "seed must be an integer"),
        ({"prompt": "a", "ignore_eos": 1}, "true or false"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias is not supported"),
        ({"prompt": "a", "stop": ["a", 1]}, "stop must be a text or a list of texts"),
        ({"prompt": "a", "logprobs": True}, "logprobs must be an integer"),
        ({"prompt": "a", "n": 1.5}, "n must be an integer"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]}, "no text"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "no text"),
        ({"messages": [{"role": "user", "content": None}]}, "no text"),
        ({"messages": [{"role": "user", "content": 5}]}, "no text"),
        ('{"messages": [{"role": "user", "content": "a", "weight": 1e999}]}', "1e999 is too large"),
        ('{"prompt": ' * 100_000, "nested too deeply"),
        ('{"prompt": "A", "id": ' + "[" * 500 + "]" * 500 + "}", "nested too deeply"),
        ({"custom_id": "a", "url": ["/v1/completions"], "body": {}}, "url must be one of"),
        ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": ["a"]}}, "prompt, if no text, must be a list"),
    ],
)
def test_bad_lines_of_jsonl(tmp_path: Path, line: Any, message: str) -> None:
    bad, good = read_json(tmp_path, line, {"prompt": "a"})
    assert message in bad.error
    assert bad.error.startswith("line 1: ")
    if not bad.api:
        assert (good.index, good.text, good.error) == (1, "a", "")


def test_a_call_of_tools_needs_no_text(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert read_json(tmp_path, {"messages": [call]})[0].messages == [call]


@pytest.mark.parametrize("line", ['{"prompt": "a"}', '{"id": 1, "messages": [{"role": "user", "content": "a"}]}'])
def test_the_first_line_tells_jsonl_whatever_the_name(tmp_path: Path, line: str) -> None:
    """Else JSON would be answered as if it were prose."""
    for name in ("p.txt", "p.json", "p"):
        first, second = read(tmp_path, f"{line}\nb\n".encode(), name)
        assert first.title == "a"
        assert "line 2: not JSON" in second.error


def test_json_that_is_no_request_is_text_unless_the_name_says_json(tmp_path: Path) -> None:
    content = b'{"name": "x"}\n'
    assert read(tmp_path, content)[0].text == '{"name": "x"}'
    assert "exactly one of prompt" in read(tmp_path, content, "p.json")[0].error
    (tmp_path / "q.txt").write_bytes(b'{"prompt": "a"}')
    assert next(iter(from_file(str(tmp_path / "q.txt"), whole=True))).text == '{"prompt": "a"}'


def test_a_bad_line_keeps_its_id(tmp_path: Path) -> None:
    (bad,) = read_json(tmp_path, {"id": "x", "prompt": 1})
    assert bad.id == "x"
    assert error_record(bad, "no") == {"index": 0, "id": "x", "line": 1, "prompt": None, "error": "no"}


def test_a_file_is_read_as_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "_count_prompts", lambda name: 2_000_000)
    seen = 0

    def lines(stream: object) -> Any:
        nonlocal seen
        for seen in range(1, 2_000_001):
            yield seen, b"a"

    monkeypatch.setattr(prompts_module, "_lines", lines)
    (tmp_path / "p.txt").write_text("a\n")
    iterator = iter(from_file(str(tmp_path / "p.txt")))
    for _ in range(10):
        next(iterator)
    assert seen == 10


@given(order=st.permutations(range(7)), finished=st.integers(0, 7), first=st.integers(0, 3))
def test_records_keep_the_order_of_the_input(order: list[int], finished: int, first: int) -> None:
    emitted: list[int] = []
    records = InOrder(emitted.append, first)
    order = [index for index in order if index >= first][:finished]
    for index in order:
        records.add(index, index)
        assert emitted == list(range(first, first + len(emitted)))
        assert records.num_early == order.index(index) + 1 - len(emitted)
    records.close()
    assert emitted == sorted(order)
