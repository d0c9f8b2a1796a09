"""What a measured difference of two runs must not depend on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import write_rand

from tinyvllm_cli.bench import peer
from tinyvllm_cli.bench.measure import Meter, Run
from tinyvllm_cli.bench.session import Session
from tinyvllm_cli.bench.workloads import Case


class HotCard:
    """Needs 100 s for a prompt behind decode steps, 110 behind another prompt, and 1 s for each decode step."""

    def __init__(self) -> None:
        self.decoded = True

    def seconds(self, prompt_tokens: int, wanted: int) -> float:
        prefill = prompt_tokens / 16 * (100.0 if self.decoded else 110.0)
        self.decoded = wanted > 1
        return prefill + wanted - 1


@pytest.mark.parametrize("warmup", [True, False])
def test_both_runs_of_a_difference_come_behind_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmup: bool
) -> None:
    card = HotCard()

    def run(self: Meter, prompts: Sequence[list[int]], params: Any, arrivals: Any = None) -> Run:
        wanted = params[0].max_tokens
        self.llm.engine.statistics.prompt_tokens += 1
        return Run(card.seconds(len(prompts[0]), wanted), [float(i) for i in range(wanted)], wanted)

    monkeypatch.setattr(Meter, "run", run)
    case = Case("decode", 2, 16, 20)
    session = Session(write_rand(tmp_path / "rand"), "cpu", [case], {}, warmup=warmup)
    assert session.measure(case, 5).samples == [20.0] * 5


@pytest.mark.parametrize("warmup", [True, False])
def test_so_do_those_of_a_peer(monkeypatch: pytest.MonkeyPatch, warmup: bool) -> None:
    card, now = HotCard(), [0.0]

    def generate(prompts: list[list[int]], wanted: list[int], temperature: float) -> int:
        now[0] += card.seconds(len(prompts[0]), wanted[0])
        return sum(wanted)

    monkeypatch.setattr(peer.time, "perf_counter", lambda: now[0])
    case = {"test": "decode", "context": 16, "batch": 2, "generated_tokens": 20, "max_id": None, "temperature": 0.0}
    request = {"config": {"vocab_size": 30}, "warmup": warmup, "repetitions": 5}
    assert peer.measure(case, request, generate, np.random.default_rng(0))["samples"] == [20.0] * 5
