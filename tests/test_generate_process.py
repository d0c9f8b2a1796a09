"""`tinyvllm generate` as a process: signals, closed pipes, terminals."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from models import byte_chain, chain, write_chain

ROOT = Path(__file__).parent.parent
HELLO = "é世👋B"


@pytest.fixture(scope="module")
def hello(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chain(tmp_path_factory.mktemp("hello"), byte_chain(HELLO))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chain(tmp_path_factory.mktemp("endless"), chain("A", "B", "A"), max_position=4096)


@pytest.fixture
def long_job(tmp_path: Path) -> Path:
    """Two short answers, then far more than a test has time for, with a short one at the end of the window."""
    path = tmp_path / "long.jsonl"
    lines = [{"prompt": "A", "max_tokens": 3 if index in (0, 1, 3) else 4000} for index in range(100)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tinyvllm_cli", "generate", "--device", "cpu", *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("TERM", "NO_COLOR", "COLUMNS")}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"} | variables


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interruption_keeps_what_is_finished(endless: Path, long_job: Path, signum: signal.Signals) -> None:
    arguments = command("--model", endless, "--json", "--max-num-seqs", 4, "--prompts", long_job)
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        first = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    records = [json.loads(line) for line in [*first, *out.splitlines()]]
    assert [record["index"] for record in records] in ([0, 1], [0, 1, 3])
    assert all(record["text"] == "BAB" for record in records)
    assert re.search(r"interrupted: [23] of 100 answered", err)
    assert "Traceback" not in err


def test_interruption_before_there_is_a_command_to_tell_it() -> None:
    """While the program's own modules are loaded; a shell sees 130, as of a process that dies by the signal."""
    interrupted = """
import os, signal, sys
class Finder:
    def find_spec(name, *args):
        if name == "tinyvllm_cli.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
from tinyvllm_cli.__main__ import run
run()
"""
    process = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout, process.stderr) == (-signal.SIGINT, "", "")


def test_interruption_before_the_model_is_there(endless: Path) -> None:
    """Standard input never ends, so the program waits for its first prompt."""
    with subprocess.Popen(
        command("--model", endless, "-"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("model: ")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def test_a_closed_pipe_ends_it_quietly(endless: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("A\n" * 5000)
    arguments = command("--model", endless, "--json", "--max-num-seqs", 4, "--prompts", tmp_path / "p.txt", "-n", 5)
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith('{"index": 0')
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=60)
    assert process.returncode == 128 + signal.SIGPIPE
    assert err == f"model: {endless}\n"


@pytest.mark.parametrize("to_file", [True, False])
def test_standard_input_is_not_the_output(hello: Path, tmp_path: Path, to_file: bool) -> None:
    """Else the file would be lost, or the answers be read as prompts without end."""
    path = tmp_path / "p.txt"
    path.write_text("A\n" * 3000)
    arguments = command("--model", hello, "-", "-n", 1, *(["-o", path, "--overwrite"] if to_file else []))
    with path.open("rb") as source, path.open("ab") as target:
        done = subprocess.run(
            arguments, stdin=source, stdout=target, stderr=subprocess.PIPE, text=True, timeout=60, env=environment()
        )
    assert done.returncode in (1, 2)
    assert ("is the input itself" if to_file else "standard input: is the output, too") in done.stderr
    assert path.read_text() == "A\n" * 3000


def in_terminal(*arguments: object, columns: int = 80, **variables: str) -> tuple[int, str]:
    """Runs with stdin, stdout and stderr on a terminal of `columns`; exit code and what the terminal got."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(
        command(*arguments), stdin=follower, stdout=follower, stderr=follower, env=environment(**variables)
    ) as process:
        os.close(follower)
        data = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # how Linux says that the other side is closed
                break
            if not chunk:
                break
            data += chunk
    os.close(leader)
    return process.returncode, data.decode().replace("\r\n", "\n")


def plain(shown: str) -> str:
    """Without colours, and without what was wiped from its line."""
    shown = re.sub(r"[^\n]*\r\x1b\[2K", "", shown)
    return re.sub(r"\x1b\[\d*m", "", shown)


def test_a_single_prompt_streams_on_a_terminal(hello: Path) -> None:
    code, shown = in_terminal("--model", hello, "A")
    assert code == 0
    lines = plain(shown).splitlines()
    assert lines[0] == f"model: {hello}"
    assert lines[1] == HELLO
    assert lines[2].startswith("1 answer · 2 tokens in, 11 out")
    assert len(lines) == 3


def test_several_prompts_on_a_narrow_terminal(endless: Path) -> None:
    """The progress line never fills the terminal's width, and is wiped before an answer is written."""
    code, shown = in_terminal("--model", endless, "-n", 150, "--max-num-seqs", 1, "A", "B", "A", columns=24)
    assert code == 0
    drawn = re.findall(r"\x1b\[2m([^\x1b\n]*)\x1b\[0m\r\x1b\[2K", shown)
    assert any("/3" in line for line in drawn)
    assert all(len(line) < 24 for line in drawn)
    text = plain(shown)
    assert text.splitlines()[1:4] == ["> A", "BA" * 75, ""]
    assert "3 answers" in text


def test_no_escapes_where_they_are_not_wanted(hello: Path) -> None:
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        _, shown = in_terminal("--model", hello, "A", "B", **variables)
        assert not re.search(r"\x1b\[\d*m", shown)
    assert "\x1b" not in shown
