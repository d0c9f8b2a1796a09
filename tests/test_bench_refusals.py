"""bench: command lines and baselines that are refused before anything is measured; what an interruption leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from program import tinyvllm

from tinyvllm_cli.bench.baseline import read_baseline
from tinyvllm_cli.errors import ExitCode, UserError

ROOT = Path(__file__).parent.parent
ROW = {"test": "prefill", "name": "", "batch": 1, "depth": 0, "prompt_tokens": 8, "generated_tokens": 1, "rate": None}
GOOD = ROW | {"samples": [1.0], "tokens_per_second": 8.0}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("-p", "x"), "'x' is no list of numbers"),
        (("-b", "0"), "at least 1"),
        (("-p", "0", "-n", "0"), "nothing is left to measure"),
        (("--suite", "targets", "-p", "4"), "says itself what is run"),
        (("--suite", "targets", "--workload", "nano"), "says itself what is run"),
        (("--suite", "other"), "no suite 'other'"),
        (("--rate", "3"), "arrivals need requests"),
        (("--workload", "nano", "--rate", "0"), "--rate"),
        (("--shape", "1B"), "a model and a shape"),
        (("--json", "--csv"), "--json and --csv"),
        (("--compare", "others"), "no peer 'others'"),
        (("--only", "decode"), "Add --suite targets"),
        (("--suite", "targets", "--only", " ,"), "--only: names nothing"),
        (("--compare", ""), "--compare: names nothing"),
        (("--repetitions", "0"), "--repetitions"),
        (("--kernels", "--workload", "nano"), "--kernels and --workload are given"),
        (("--stages", "--compare", "transformers"), "--stages and --compare are given"),
        (("--kernels", "--baseline", "x.json"), "--kernels and --baseline are given"),
    ],
)
def test_wrong_command_lines_are_refused_at_once(arguments: tuple[str, ...], fault: str) -> None:
    done = tinyvllm("bench", "--device", "cpu", "--model", "demo", *arguments)
    assert (done.code, done.out) == (ExitCode.USAGE, "")
    assert fault in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    done = tinyvllm("bench", "--device", "cuda")
    assert (done.code, done.out) == (ExitCode.ERROR, "")
    assert "--device cuda: no CUDA device can be used" in done.err


@pytest.mark.parametrize("plot", ["FOLDER.svg", "no/where.svg", "a" * 300 + ".svg"])
def test_a_plot_that_cannot_be_written_is_refused_at_once(tmp_path: Path, plot: str) -> None:
    folder = tmp_path / "FOLDER.svg"
    folder.mkdir()
    done = tinyvllm("bench", "--device", "cpu", "--model", "demo", "--plot", plot.replace("FOLDER.svg", str(folder)))
    assert (done.code, done.out) == (ExitCode.ERROR, "")
    assert done.err.startswith("error: ")


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        "[]",
        {"environment": {}, "results": [[]]},
        {"environment": {}, "results": [ROW | {"samples": [1.0]}]},
        *({"environment": {}, "results": [GOOD | {"samples": [value]}]} for value in ("a", 0, -1.0, None, 1e999)),
        {"environment": {}, "results": [GOOD | {"test": ["prefill"]}]},
        {"environment": {}, "results": [GOOD | {"tokens_per_second": "fast"}]},
    ],
)
def test_a_broken_baseline_is_refused(tmp_path: Path, content: Any) -> None:
    """Else the run would end in a traceback when all is measured."""
    path = tmp_path / "before.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match="no result of an earlier run"):
        read_baseline(path)
    path.write_text(
        json.dumps({"environment": {}, "results": [GOOD, ROW | {"samples": [], "tokens_per_second": None}]})
    )
    assert len(read_baseline(path)["results"]) == 2


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_removes_temporary_folders(tmp_path: Path, signum: signal.Signals) -> None:
    """The checkpoints that starts are timed with may have gigabytes."""
    command = ["bench", "--device", "cpu", "--suite", "targets", "--only", "inspect", "-r", "1000", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "tinyvllm_cli", *command], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(600):
            if list(tmp_path.glob("tinyvllm-bench-*")):
                break
            time.sleep(0.1)
        process.send_signal(signum)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (ExitCode.INTERRUPTED, "")
    assert not list(tmp_path.glob("tinyvllm-bench-*"))
