"""How `generate` looks, without a model: the sink, the console, the command line's own errors."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.commands.generate import GenerateResult
from tinyvllm_cli.jobs.json_line import dump_json
from tinyvllm_cli.jobs.lines import Prompt
from tinyvllm_cli.jobs.prompts import from_arguments
from tinyvllm_cli.render.console import Console, Mode, one_line, printable
from tinyvllm_cli.render.generate import GenerateView
from tinyvllm_cli.render.progress import Progress


class Stream(io.StringIO):
    """A stream that may claim to be a terminal."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def make_view(
    *texts: str, mode: Mode = "human", stream: bool | None = None, terminal: bool = False, quiet: bool = False
) -> tuple[GenerateView, list[Prompt], Stream, Stream]:
    out, err = Stream(terminal), Stream(terminal)
    view = GenerateView(Console(mode, quiet=quiet, out=out, err=err), stream)
    source = from_arguments(texts)
    view.start(source)
    return view, list(source), out, err


def answer(prompt: Prompt, text: str) -> dict[str, Any]:
    return {"index": prompt.index, "prompt": prompt.text, "text": text}


def test_a_single_answer_stands_alone() -> None:
    view, (prompt,), out, _ = make_view("Q")
    view.record(prompt, answer(prompt, "A\n B"))
    assert out.getvalue() == "A\n B\n"


def test_several_answers_stand_below_their_prompts() -> None:
    view, prompts, out, err = make_view("Q1", "Q\n2", "Q3")
    view.record(prompts[0], answer(prompts[0], "A1"))
    view.record(prompts[1], {"index": 1, "prompt": "Q\n2", "error": "too\nlong"})
    view.record(prompts[2], answer(prompts[2], "A3"))
    assert out.getvalue() == "> Q1\nA1\n\n> Q\\n2\n(no answer: too\\nlong)\n\n> Q3\nA3\n"
    assert err.getvalue() == "error: prompt 2: too\nlong\n"


def test_error_of_a_single_prompt_leaves_stdout_empty() -> None:
    view, (prompt,), out, err = make_view("Q")
    view.record(prompt, {"index": 0, "prompt": "Q", "error": "too long"})
    assert (out.getvalue(), err.getvalue()) == ("", "error: too long\n")


def test_json_lines() -> None:
    view, prompts, out, err = make_view("Q1", "Q2", mode="json")
    assert not view.streams
    records = [answer(prompts[0], "é\u2028\x85\x1b\r\n"), {"index": 1, "prompt": "Q2", "error": "no"}]
    for prompt, record in zip(prompts, records, strict=True):
        view.record(prompt, record)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == records
    assert err.getvalue() == "error: prompt 2: no\n"


@given(data=st.data(), terminal=st.booleans())
def test_streaming_shows_the_same_as_waiting(data: st.DataObject, terminal: bool) -> None:
    """However the tokens of three answers are interleaved; an error may be among them."""
    pieces = data.draw(st.lists(st.lists(st.sampled_from(["a", "b c", "\n", "é"]), max_size=3), min_size=1, max_size=3))
    failing = data.draw(st.sampled_from([None, *range(len(pieces))]))
    texts = [f"Q{number}" for number in range(len(pieces))]
    streaming, prompts, streamed, _ = make_view(*texts, stream=True, terminal=terminal)
    waiting, _, waited, _ = make_view(*texts, stream=False, terminal=terminal)
    events = [(index, piece) for index, item in enumerate(pieces) if index != failing for piece in item]
    events = sorted(events, key=lambda event: data.draw(st.integers(0, 9)) if len(pieces) > 1 else 0)
    streams = [list(item) for item in pieces]
    for index, _ in events:
        streaming.text(prompts[index], streams[index].pop(0))
    for prompt, item in zip(prompts, pieces, strict=True):
        record = answer(prompt, "".join(item))
        if prompt.index == failing:
            record = {"index": prompt.index, "prompt": prompt.text, "error": "no"}
        streaming.record(prompt, record)
        waiting.record(prompt, record)
    assert streamed.getvalue() == waited.getvalue()


def test_streamed_text_is_shown_at_once() -> None:
    view, prompts, out, _ = make_view("Q1", "Q2", stream=True)
    view.text(prompts[1], "later")
    assert out.getvalue() == ""
    view.text(prompts[0], "now")
    assert out.getvalue() == "> Q1\nnow"
    view.record(prompts[0], answer(prompts[0], "now"))
    assert out.getvalue() == "> Q1\nnow\n\n> Q2\nlater"


@pytest.mark.parametrize(
    ("texts", "terminal", "option", "mode", "expected"),
    [
        (("Q",), True, None, "human", True),
        (("Q",), False, None, "human", False),
        (("Q", "R"), True, None, "human", False),
        (("Q", "R"), False, True, "human", True),
        (("Q",), True, False, "human", False),
        (("Q",), True, None, "json", False),
    ],
)
def test_when_text_is_streamed(
    texts: tuple[str, ...], terminal: bool, option: bool, mode: Mode, expected: bool
) -> None:
    view, *_ = make_view(*texts, terminal=terminal, stream=option, mode=mode)
    assert view.streams is expected


def test_interrupted_line_is_ended() -> None:
    view, (prompt,), out, err = make_view("Q", stream=True)
    view.text(prompt, "half")
    view.finish(GenerateResult(total=1, interrupted=True))
    assert out.getvalue() == "half\n"
    assert err.getvalue().startswith("interrupted: 0 of 1 answered")


STATE = GenerateResult(
    total=1040,
    num_records=1010,
    num_resumed=1000,
    num_errors=1,
    prompt_tokens=400,
    output_tokens=1000,
    generate_s=2.0,
    num_running=8,
    num_waiting=4,
    kv_use=0.25,
)
WORDS = "0:06 left · 500 tokens/s out · 200 in · 8 running, 4 waiting · KV cache 25% · 1 error"


def after(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic() + seconds
    monkeypatch.setattr("tinyvllm_cli.render.generate.time.monotonic", lambda: now)


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    view, _, out, err = make_view("Q", "R", terminal=True, mode="json")
    view.progress(STATE)
    assert err.getvalue() == ""  # not so soon
    monkeypatch.setattr("tinyvllm_cli.render.console._terminal_width", lambda stream: 200)
    after(0.2, monkeypatch)
    view.progress(STATE)
    assert f"{'█' * 15}░ 1,010/1,040 · {WORDS}" in err.getvalue()
    view.finish(STATE)
    assert out.getvalue() == ""


def test_progress_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line now and then, for jobs; nothing for a single prompt, and nothing with --quiet."""
    for texts, quiet, seconds, expected in (
        (("Q", "R"), False, 11, f"1,010/1,040 done · {WORDS}\n"),
        (("Q", "R"), False, 5, ""),
        (("Q", "R"), True, 11, ""),
        (("Q",), False, 11, ""),
    ):
        with monkeypatch.context() as patch:
            view, _, _, err = make_view(*texts, quiet=quiet)
            after(seconds, patch)
            view.progress(STATE)
            view.progress(STATE)
        assert err.getvalue() == expected


def test_token_rates_are_those_of_the_last_seconds() -> None:
    progress = Progress()
    for second in range(1, 61):
        tokens = 100 * second if second <= 40 else 4000 + 10 * (second - 40)
        line = progress.line(GenerateResult(output_tokens=tokens, generate_s=second), bar=False)
        if second == 30:
            assert "100 tokens/s out" in line
    assert "0 done · 10 tokens/s out" in line
    assert len(progress._samples) < 13


def test_several_answers_to_a_prompt() -> None:
    view, (prompt,), out, _ = make_view("Q")
    view.record(prompt, {"index": 0, "samples": [{"text": "A"}, {"text": "B"}]})
    assert out.getvalue() == "[1] A\n[2] B\n"


def test_records_that_go_to_a_file_are_not_shown() -> None:
    out, err = Stream(True), Stream()
    view = GenerateView(Console(out=out, err=err), None, "tinyvllm generate --resume")
    source = from_arguments(["Q"])
    view.start(source, to_file=True)
    assert not view.streams
    (prompt,) = source
    view.record(prompt, answer(prompt, "A"))
    view.record(prompt, {"index": 0, "error": "no"})
    view.finish(GenerateResult(total=1, num_records=1, output="o.jsonl", interrupted=True, can_resume=True))
    assert out.getvalue() == ""
    assert err.getvalue() == (
        "error: no\ninterrupted: 1 of 1 answered · in o.jsonl\nto go on: tinyvllm generate --resume\n"
    )


def test_only_some_errors_are_shown() -> None:
    view, prompts, _, err = make_view(*(f"Q{number}" for number in range(30)), mode="json")
    for prompt in prompts:
        view.record(prompt, {"index": prompt.index, "error": "no"})
    view.finish(GenerateResult(total=30, num_records=30, num_errors=30))
    assert err.getvalue().count("error: ") == 10
    assert "... and 20 more errors" in err.getvalue()


def test_nothing_from_a_model_moves_the_cursor_of_a_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07\n\té\x9b\u202e") == "a\\x1b[2Jb\\r\\x07\n\té\\x9b\\u202e"
    assert one_line("a\nb" * 9, 8) == "a\\nba\\n…"
    view, (prompt,), out, _ = make_view("Q", terminal=True)
    view.record(prompt, answer(prompt, "\x1b]0;title\x07"))
    assert out.getvalue() == "\\x1b]0;title\\x07\n"


def test_json_is_strict_and_utf8() -> None:
    assert dump_json({"a": "é"}) == '{"a": "é"}'
    assert json.loads(dump_json({"a": "\ud800é👋"}).encode()) == {"a": "\ud800é👋"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump_json(float("nan"))
