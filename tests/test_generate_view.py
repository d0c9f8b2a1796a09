"""How `generate` looks, without a model: the sink, the console, the command line's own errors."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from files import write_tensors
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli.commands.generate import GenerateResult
from tinyvllm_cli.commands.model import resolve_model
from tinyvllm_cli.errors import UserError
from tinyvllm_cli.jobs.prompts import Prompt, from_arguments
from tinyvllm_cli.options import parse_bytes
from tinyvllm_cli.render.console import Console, Mode, dump_json, one_line, printable
from tinyvllm_cli.render.generate import GenerateView

ROOT = Path(__file__).parent.parent


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


def test_progress_shows_on_a_terminal_only() -> None:
    state = GenerateResult(total=40, num_records=10, output_tokens=1000, generate_s=2.0)
    view, _, out, err = make_view("Q", "R", terminal=True, mode="json")
    view.progress(state)
    assert "10/40 · 500 tokens/s · 0:06 left" in err.getvalue()
    view.finish(state)
    assert out.getvalue() == ""
    for quiet, terminal in ((True, True), (False, False)):
        view, _, _, err = make_view("Q", "R", terminal=terminal, quiet=quiet)
        view.progress(state)
        assert err.getvalue() == ""


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [("17", 17), ("512MiB", 2**29), ("2G", 2**31), ("1.5GB", 1_500_000_000), ("3 kib", 3072), ("8b", 8), ("1T", 2**40)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "2X", "G", "1e9", "2 G B"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_bytes(text)


# The choice of the model


def test_model_named_by_option_variable_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    monkeypatch.setenv("TINYVLLM_MODEL", str(folder))
    assert resolve_model(str(tmp_path)) == (tmp_path, f"model: {tmp_path}")
    assert resolve_model(None) == (folder, f"model: {folder} (from TINYVLLM_MODEL)")
    monkeypatch.setenv("TINYVLLM_MODEL", "")
    (folder / "config.json").touch()
    (folder / "model.safetensors").touch()
    monkeypatch.chdir(folder)
    assert resolve_model(None) == (folder, f"model: {folder} (the current folder)")


@pytest.mark.parametrize(
    ("name", "hint"), [("org/name", "hf download org/name"), ("./nowhere", "Give a model"), ("", "")]
)
def test_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        resolve_model(name)
    assert "--model" in str(caught.value)
    assert hint in str(caught.value)


# The program as a process, as far as it goes without a model


def tinyvllm(*arguments: str, stdin: str = "", cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tinyvllm_cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_help_is_fast_and_light() -> None:
    began = time.perf_counter()
    for command in ([], ["generate"]):
        assert "Usage: tinyvllm" in tinyvllm(*command, "--help").stdout
    assert time.perf_counter() - began < 2.0  # 0.1 s each on an idle machine; the test's may be busy
    code = (
        "import sys, tinyvllm_cli.cli; print([m for m in ('torch', 'rich', 'numpy', 'tokenizers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout == "[]\n"


def test_version() -> None:
    assert tinyvllm("--version").stdout.startswith("tinyvllm 0.")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate"], 2, "no prompt given"),
        (["generate", "a", "--prompts", "b"], 2, "both"),
        (["generate", "a", "--max-tokens", "0"], 2, "max_tokens must be at least 1"),
        (["generate", "a", "--max-tokens", "x"], 2, "x"),
        (["generate", "a", "--temperature", "-1"], 2, "temperature"),
        (["generate", "a", "--temperature", "nan"], 2, "temperature"),
        (["generate", "a", "--top-p", "1.5"], 2, "top_p must be above 0 and at most 1"),
        (["generate", "a", "--seed", "-1"], 2, "seed"),
        (["generate", "a", "--block-size", "0"], 2, "--block-size"),
        (["generate", "a", "--kv-cache-memory", "2X"], 2, "'2X' is no size"),
        (["generate", "a", "--device", "tpu"], 2, "tpu"),
        (["generate", "a", "--json", "--stream"], 2, "--stream"),
        (["generate", "a", "--model", "nowhere"], 1, "--model: there is no nowhere"),
        (["generate", ""], 2, "prompt 1 is empty"),
        (["generate", "--prompts", "nowhere.txt"], 1, "nowhere.txt: cannot be read"),
        (["generate", "--prompts", "-"], 1, "standard input: holds no prompt"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_wrong_command_lines(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    if arguments[0] == "generate" and "--model" not in arguments:
        arguments = [*arguments, "--model", str(tmp_path)]
    result = tinyvllm(*arguments)
    assert result.returncode == code
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [(">&-", 0, ""), ("2>&-", 0, ""), ("<&- --format text --prompts -", 1, "standard input: is closed")],
)
def test_closed_streams(redirection: str, code: int, message: str) -> None:
    command = "--version" if code == 0 else "generate --model ."
    result = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m tinyvllm_cli {command} {redirection}"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert (result.returncode, message in result.stderr) == (code, True)
    assert "Traceback" not in result.stderr


def test_model_that_is_a_file(tmp_path: Path) -> None:
    pointer = tmp_path / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UserError, match="Git LFS pointer"):
        resolve_model(str(pointer))
    write_tensors(pointer, {})
    with pytest.raises(UserError, match="is a file") as caught:
        resolve_model(str(pointer))
    assert str(tmp_path) in caught.value.fix


def test_arguments_that_are_not_utf8() -> None:
    with pytest.raises(UserError, match="prompt 2 is not UTF-8"):
        from_arguments(["a", "\udcff"])
