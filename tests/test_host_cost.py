"""What a step asks of the host, by counts, which no busy machine changes; `bench_engine.py` has the times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import bench_engine
import pytest
import torch

from tinyvllm_cli.engine.sequence import SamplingParams

ROWS = 64


def calls(function: Callable[[], Any]) -> int:
    """How many functions are called while `function` runs, Python's own and those written in C."""
    count = 0

    def see(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("kind", "a_row"), [("text at the end", 6), ("stop strings", 16), ("streamed", 20), ("penalties", 6)]
)
def test_a_row_of_a_decode_step_takes_few_calls(kind: str, a_row: int) -> None:
    """At 256 rows and 0.1 us a call: a small part of the 2 ms that a decode step of a 1B model takes on an H200."""
    found = {}
    for rows in (ROWS, 2 * ROWS):
        _, requests = bench_engine.decoding(rows, 20, kind)
        requests.step()
        found[rows] = min(calls(requests.step) for _ in range(3))
    assert found[2 * ROWS] - found[ROWS] <= a_row * ROWS
    assert found[ROWS] <= a_row * ROWS + 160


def test_a_decode_step_uploads_only_new_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, requests = bench_engine.decoding(ROWS, 40, "text at the end")
    size = llm.limits.block_size
    sent: list[int] = []

    def send(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(llm.runner, "_to_device", send)
    monkeypatch.setattr(llm.runner, "_upload", lambda *_: pytest.fail("the rows have not changed"))
    for _ in range(size):
        requests.step()
    assert len(sent) < size
    assert sum(sent) == ROWS * 12  # index and number of one block for each row


def test_a_prompt_is_planned_in_as_many_calls_whatever_its_length() -> None:
    """No loop over its tokens in Python; only numpy sees them."""
    found = []
    for tokens in (20, 5000):
        engine = bench_engine.make_engine(rows=4, model_len=6000, run_ahead=0, prefix_cache=False)
        prompt = list(range(tokens))
        found.append(calls(lambda: engine.add(prompt, SamplingParams(max_tokens=2))))  # noqa: B023
        found.append(calls(engine.step))
    assert found[2:] == found[:2]
    assert sum(found[:2]) < 300


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the machine: a step that takes 100 ms is no noise."""
    bench_engine.main(["--rows", "32", "--steps", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(bench_engine.KINDS) + 4 + 2
    for line in lines[1 : 1 + len(bench_engine.KINDS)]:
        assert 0 < float(line.split()[-1]) < 100_000
