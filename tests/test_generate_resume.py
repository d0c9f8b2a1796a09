"""A job that is stopped, by whatever signal, and goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import kill_resume
import pytest
from models import chain, write_chain
from test_generate_process import command, environment


def test_killed_jobs_are_completed(tmp_path: Path) -> None:
    hits, _ = kill_resume.run(tmp_path, 3, 5)
    assert hits >= 3


@pytest.mark.parametrize(("signum", "order"), [(signal.SIGINT, "input"), (signal.SIGTERM, "finished")])
def test_interrupted_jobs_tell_how_to_go_on(tmp_path: Path, signum: signal.Signals, order: str) -> None:
    """Ctrl-C keeps what is finished, also what was not yet its turn; the command that is shown does the rest."""
    model = write_chain(tmp_path / "m", chain("A", "B", "A"), max_position=4096)
    lines = [{"prompt": "A", "max_tokens": 3 if i in (0, 1, 3) else 300} for i in range(12)]
    source, output = tmp_path / "a job.jsonl", tmp_path / "o.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = command("--model", model, "--prompts", source, "-o", output, "--order", order, "--max-num-seqs", 4)
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        while not output.exists() or output.read_bytes().count(b"\n") < 2:
            assert process.poll() is None
        process.send_signal(signum)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    assert {0, 1} <= {record["index"] for record in kept} < set(range(12))
    assert re.search(rf"interrupted: {len(kept)} of 12 answered", err)
    shown = re.search(r"^to go on: tinyvllm (.*)$", err, re.MULTILINE)
    assert shown
    again = ["bash", "-c", f"{arguments[0]} -m tinyvllm_cli {shown[1]}"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 0, done.stderr
    assert f"12 answers · {len(kept)} of them from before" in done.stderr
    indices = [json.loads(line)["index"] for line in output.read_text().splitlines()]
    assert sorted(indices) == list(range(12))
    assert order == "finished" or indices == sorted(indices)


def test_a_job_goes_on_however_many_records_wait_for_an_older_prompt(tmp_path: Path) -> None:
    """As after Ctrl-C with many rows and a first answer that takes long, when it goes on with few rows."""
    model = write_chain(tmp_path / "m", chain("A", "B", "A"))
    source, output = tmp_path / "p.txt", tmp_path / "o.jsonl"
    source.write_text("A\n" * 30)
    arguments = command("--model", model, "-p", source, "-o", output, "-n", 2, "-q")
    subprocess.run(arguments, check=True, timeout=60, env=environment())
    whole = output.read_text().splitlines(keepends=True)
    output.write_text("".join(whole[1:25]))
    subprocess.run([*arguments, "--resume", "--max-num-seqs", "1"], check=True, timeout=60, env=environment())
    assert [json.loads(line)["index"] for line in output.read_text().splitlines()] == list(range(30))


def test_a_second_interruption_leaves_at_once(tmp_path: Path) -> None:
    """The step that runs is so long that the first one has to wait for it."""
    model = write_chain(tmp_path / "m", chain("A", "B", "A"), max_position=4096)
    source = tmp_path / "p.txt"
    source.write_text("A\n" * 20000)
    slow = "import time, tinyvllm_cli.generation as g\nstep = g.Requests.step\n"
    slow += "def late(self):\n    try:\n        print('in', flush=True); time.sleep(30)\n"
    slow += "    except KeyboardInterrupt:\n        print('held', flush=True); time.sleep(30)\n    return step(self)\n"
    arguments = command("--model", model, "-p", source)[3:]
    slow += f"g.Requests.step = late\nfrom tinyvllm_cli.cli import main\nmain({arguments!r})"
    with subprocess.Popen(
        [command()[0], "-c", slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 130


def test_a_job_in_a_log_shows_lines_of_progress(tmp_path: Path) -> None:
    model = write_chain(tmp_path / "m", chain("A", "B", "A"))
    source = tmp_path / "p.txt"
    source.write_text("A\n" * 30)
    code = "import tinyvllm_cli.render.generate as g; g._LOG_S = 0.01\n"
    code += "from tinyvllm_cli.cli import main; main({!r})"
    for quiet, expected in (([], True), (["-q"], False)):
        arguments = command("--model", model, "-p", source, "-n", 40, "--max-num-seqs", 4, "-o", os.devnull, *quiet)[3:]
        done = subprocess.run(
            [command()[0], "-c", code.format(arguments)], capture_output=True, text=True, env=environment(), timeout=60
        )
        assert done.returncode == 0
        assert (
            bool(re.search(r"^\d+/30 done · .*left · .* running, .* waiting · KV cache \d+%$", done.stderr, re.M))
            == expected
        )
        assert "\x1b" not in done.stderr
        assert bool(done.stderr) == expected
