"""The command line of `generate`: options, refusals, the choice of the model, streams that are closed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from files import write_tensors
from models import write_rand

from tinyvllm_cli.commands.model import resolve_model
from tinyvllm_cli.errors import UserError
from tinyvllm_cli.jobs.prompts import from_arguments
from tinyvllm_cli.options import parse_bytes

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("17", 17),
        ("512MiB", 2**29),
        ("2G", 2**31),
        ("1.5GB", 1_500_000_000),
        ("3 kib", 3072),
        ("8b", 8),
        ("1T", 2**40),
        ("9" * 400, 2**63 - 1),
    ],
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
        (["generate", "a", "--n", "0"], 2, "n must be from 1 to 256"),
        (["generate", "a", "--n", "2", "--greedy"], 2, "n must be 1 at temperature 0"),
        (["generate", "a", "--greedy", "--temperature", "1"], 2, "--greedy"),
        (["generate", "a", "--repetition-penalty", "0"], 2, "above 0"),
        (["generate", "a", "--presence-penalty", "3"], 2, "from -2 to 2"),
        (["generate", "a", "--frequency-penalty", "-3"], 2, "from -2 to 2"),
        (["generate", "a", "--logprobs", "21"], 2, "from 0 to 20"),
        (["generate", "a", "--stop", ""], 2, "stop"),
        (["generate", "a", "--stop", "\udcff"], 2, "of whole characters"),
        (["generate", "a", "--stop-token-id", "-1"], 2, "stop_token_ids"),
        (["generate", "a", "--resume"], 2, "--output FILE"),
        (["generate", "a", "--resume", "--overwrite", "-o", "x"], 2, "exclude"),
        (["generate", "a", "--whole-file"], 2, "--whole-file"),
        (["generate", "--prompts", "x.jsonl", "--whole-file"], 2, "--whole-file"),
        (["generate", "a", "--stream", "-o", "x"], 2, "--stream"),
        (["generate", "a", "--output", "."], 2, "is a folder"),
        (["generate", "a", "--output", "no/where"], 2, "there is no folder no"),
        (["generate", "a", "--block-size", "0"], 2, "--block-size"),
        (["generate", "a", "--kv-cache-memory", "2X"], 2, "'2X' is no size"),
        (["generate", "a", "--device", "tpu"], 2, "tpu"),
        (["generate", "a", "--json", "--stream"], 2, "--stream"),
        (["generate", "a", "--model", "nowhere"], 1, "--model: there is no nowhere"),
        (["generate", ""], 2, "prompt 1 is empty"),
        (["generate", "--prompts", "nowhere.txt"], 1, "nowhere.txt: cannot be read"),
        (["generate", "--prompts", "-"], 1, "standard input: holds no prompt"),
        (["generate", "a", "--output", "-"], 2, "--output - is no file"),
        (["generate", "a", "-"], 2, "- reads all prompts from standard input"),
        (["generate", "--prompts", "/dev/zero"], 1, "/dev/zero: is a binary file"),
        (["generate", "a", "--output", "a" * 300], 1, "File name too long"),
        (["generate", "a", "--model", "a" * 300], 1, "File name too long"),
        (["generate", "a", "--model", "~nobody/m"], 1, "there is no ~nobody/m"),
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
    cache = tmp_path / "snapshots"
    cache.mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).touch()
        (cache / name).symlink_to(tmp_path / name)
        with pytest.raises(UserError, match="is a file") as caught:
            resolve_model(str(cache / name))
        assert caught.value.fix.endswith(str(cache))


def test_arguments_that_are_not_utf8() -> None:
    with pytest.raises(UserError, match="prompt 2 is not UTF-8"):
        from_arguments(["a", "\udcff"])


def test_arguments_in_utf8_under_another_locale(tmp_path: Path) -> None:
    """Python knows them as bytes only, in a container without a locale and with its UTF-8 mode off."""
    variables = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    code = """
import sys
from tinyvllm_cli.jobs.prompts import from_arguments
print([ascii(prompt.text) for prompt in from_arguments(sys.argv[1:])])
"""
    result = subprocess.run(
        [sys.executable, "-c", code, "é世"], capture_output=True, text=True, env={**os.environ, **variables}, check=True
    )
    assert result.stdout == str([ascii("é世")]) + "\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [("generate --model MODEL -n 2 A 2>/dev/full", 0), ("inspect MODEL | head -1; exit ${PIPESTATUS[0]}", 141)],
)
def test_notes_that_nobody_reads_end_no_job_and_closed_pipes_end_quietly(
    tmp_path: Path, command: str, code: int
) -> None:
    model = write_rand(tmp_path / "m")
    line = f"{sys.executable} -m tinyvllm_cli " + command.replace("MODEL", str(model))
    result = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, cwd=ROOT)
    assert (result.returncode, result.stderr) == (code, b"")
    assert result.stdout.endswith(b"\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate --model MODEL A >&-", b"error: standard output is closed\n"),
        ("generate --model MODEL --table A >&-", b"error: standard output is closed\n"),
        ("inspect MODEL >&-", b"error: standard output is closed\n"),
        ("--help >/dev/full", b"error: the output cannot be written: No space left on device\n"),
        ("bench --help >/dev/full", b"error: the output cannot be written: No space left on device\n"),
    ],
)
def test_answers_are_never_lost_without_a_word(tmp_path: Path, command: str, message: bytes) -> None:
    line = f"{sys.executable} -m tinyvllm_cli " + command.replace("MODEL", str(write_rand(tmp_path / "m")))
    result = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, cwd=ROOT)
    assert result.returncode == 1
    assert message in result.stderr
    assert b"Traceback" not in result.stderr


def test_output_that_is_redirected_into_the_input_is_refused(tmp_path: Path) -> None:
    """It would be read as it grows, and the job would never end."""
    (tmp_path / "p.txt").write_text("A\n")
    command = (
        f"{sys.executable} -m tinyvllm_cli generate --model {tmp_path} --prompts {tmp_path}/p.txt >> {tmp_path}/p.txt"
    )
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (result.returncode, "p.txt: is the output, too" in result.stderr) == (1, True)
    assert (tmp_path / "p.txt").read_text() == "A\n"


def test_a_long_prompt_is_no_file_name(tmp_path: Path) -> None:
    """86 Chinese characters have more bytes than a file's name may have."""
    result = tinyvllm("generate", "中" * 100, "--model", str(tmp_path))
    assert "config.json: there is no such file" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    command = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m tinyvllm_cli inspect -q"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
