"""bench --workload 64+8192: what a long prompt that comes late costs the sequences that decode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models import write_rand

from tinyvllm_cli.bench.measure import Meter, Run
from tinyvllm_cli.bench.session import Session
from tinyvllm_cli.bench.workloads import find_workload, workload_case
from tinyvllm_cli.commands.bench import BenchOptions, _cases

SMALL = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 96, "max_position": 256}


def test_the_job_is_named_by_its_numbers() -> None:
    job = find_workload("64+8192")
    assert [request.prompt_tokens for request in job.requests] == [64] * 64 + [8192]
    assert job.interference
    (case,) = _cases(BenchOptions(workload="64+8192", engine={"max_batched_tokens": 512}), "cuda")
    assert (case.name, case.batch) == ("64+8192, 512 a step", 65)


@pytest.mark.parametrize(("bound", "steps"), [(32, 7), (203, 1), (None, 1)])
def test_only_what_comes_between_arrival_and_first_token_counts(
    bound: int | None, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 sequences decode; the prompt gets what they leave of each step."""
    runs: list[Run] = []
    original = Meter.run

    def spy(self: Meter, prompts: Sequence[list[int]], params: Any, arrivals: Any = None) -> Run:
        runs.append(original(self, prompts, params, arrivals))
        return runs[-1]

    monkeypatch.setattr(Meter, "run", spy)
    case = workload_case(find_workload("3+200"), 32)
    session = Session(write_rand(tmp_path / "rand", **SMALL), "cpu", [case], {"max_batched_tokens": bound})
    result = session.measure(case, 2)
    assert result.error is None
    assert len(runs) == 4  # two of them to warm up
    for run in runs:
        assert len(run.first_token) == 1
        assert len(run.between_tokens) == 3 * steps
        assert 0 < max(run.between_tokens) <= run.first_token[0] + 0.1
        assert [len(tokens) for tokens in run.outputs] == [192, 192, 192, 1]
    assert result.latency is not None
    assert result.latency["time_between_tokens_ms"]["p99"] > 0
    assert result.share_of_ceiling is None


def test_on_each_device(device: str, tmp_path: Path) -> None:
    model = write_rand(tmp_path / "rand", dtype="bfloat16", head_dim=64, **SMALL)
    case = workload_case(find_workload("5+150"), 32)
    result = Session(model, device, [case], {"max_batched_tokens": 48}).measure(case, 1)
    assert result.error is None
    assert result.latency is not None
    assert result.latency["time_to_first_token_ms"]["p50"] > 0
