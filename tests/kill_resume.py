"""Kills jobs with SIGKILL again and again and resumes them: `python tests/kill_resume.py 50` (CI does a few)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

from models import chain, write_chain

ROOT = Path(__file__).parent.parent
NUM_LINES = 200
KILLS_PER_JOB = 5


def write_job(folder: Path) -> tuple[Path, Path]:
    """A model and 200 lines of different lengths, some of which are errors."""
    model = write_chain(folder / "model", chain("A", "B", "A"))
    lines = [
        {"prompt": "A" * (1 + i % 9), "max_tokens": 0 if i % 50 == 7 else 1 + i * 37 % 60} for i in range(NUM_LINES)
    ]
    source = folder / "prompts.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return model, source


def start(model: Path, source: Path, output: Path, order: str, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tinyvllm_cli", "generate", "--device", "cpu", "--model", str(model)]
    command += ["--prompts", str(source), "--output", str(output), "--order", order, "--max-num-seqs", "4", "-q", *more]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})


def finish(process: subprocess.Popen[bytes]) -> None:
    assert process.wait(timeout=120) == 3  # errors among the records


def records(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in json.loads(line).items() if k != "timing"} for line in path.read_text().splitlines()]


def kill_at_random(process: subprocess.Popen[bytes], output: Path, rng: random.Random) -> bool:
    """Waits for some more records, or none, and then a moment; returns whether the process was still there to kill."""
    had = output.read_bytes().count(b"\n") if output.exists() else 0
    wanted = had + rng.choice([0, 1, rng.randrange(NUM_LINES // KILLS_PER_JOB)])
    while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < wanted):
        time.sleep(0.001)
    time.sleep(rng.choice([0, rng.random() * 0.01, rng.random() * 3 if wanted == had else 0]))
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def run(folder: Path, kills: int, seed: int) -> tuple[int, int]:
    """Jobs that are killed up to KILLS_PER_JOB times each and then finished; (kills that hit, torn lines seen)."""
    rng = random.Random(seed)
    model, source = write_job(folder)
    whole = folder / "whole.jsonl"
    finish(start(model, source, whole, "input"))
    expected = records(whole)
    assert len(expected) == NUM_LINES
    hits, torn, job = 0, 0, 0
    while hits < kills:
        order, output = ("input", "finished")[job % 2], folder / f"job{job}.jsonl"
        for _ in range(min(KILLS_PER_JOB, kills - hits)):
            hits += kill_at_random(start(model, source, output, order, "--resume"), output, rng)
            torn += output.exists() and not output.read_bytes().endswith(b"\n") and output.stat().st_size > 0
        finish(start(model, source, output, order, "--resume"))
        found = records(output)
        assert order == "finished" or [r["index"] for r in found] == list(range(NUM_LINES)), "the order is wrong"
        found.sort(key=lambda r: int(r["index"]))
        different = [pair for pair in zip_longest(found, expected) if pair[0] != pair[1]]
        assert not different, f"job {job}: {len(found)} records, the first that differs: {different[0]}"
        job += 1
    return hits, torn


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print("{} kills, {} torn lines: every record is there, once".format(*run(Path(name), int(sys.argv[1]), 1)))
