"""Which steps are captured, and that padding to a captured size changes no token.

On the CPU a graph is the recorded work done again: the same launches over the same padded memory, whatever the step
that comes. On CUDA the graphs are real, and test_model compares them with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_model import generate, random_prompts

from tinyvllm_cli import gemm, ops
from tinyvllm_cli.bench.shapes import SHAPES
from tinyvllm_cli.llm import LLM
from tinyvllm_cli.memory.plan import Limits, plan_buffers
from tinyvllm_cli.model import graphs
from tinyvllm_cli.model.decode_share import decode_share
from tinyvllm_cli.model.graphs import TOKENS, StepGraphs, StepSize, Work, decode_bucket, padded_size

PROMPTS = random_prompts([1, 9, 16, 33, 5, 60, 3, 100, 32, 17], seed=9)
LIMITS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "chunks of 17": {"max_batched_tokens": 17, "max_num_seqs": 9},
    "chunks of 40": {"max_batched_tokens": 40, "max_num_seqs": 16},
    "three at once, two steps ahead": {"max_num_seqs": 3, "run_ahead": 2},
    "few blocks, chunks": {"num_kv_blocks": 29, "block_size": 4, "max_batched_tokens": 64, "run_ahead": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_rand(tmp_path_factory.mktemp("rand"), dtype="bfloat16")


class Recorder:
    """Stands for graphs on the CPU, and counts what is done by them."""

    def __init__(self, llm: LLM) -> None:
        self.replays = 0
        if llm.device.type == "cpu":
            llm.runner.graphs = StepGraphs(self.capture)

    def capture(self, work: Work) -> Work:
        def replay() -> None:
            self.replays += 1
            work()

        return replay


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3, "presence_penalty": 0.5, "logprobs": 2}])
def test_graphs_change_no_token(folder: Path, name: str, params: dict[str, Any]) -> None:
    """Decodes and chunks of every mixture; all that a step may not read is poisoned."""
    plain = LLM(folder, device="cpu", graphs=False, **LIMITS[name])
    expected = generate(plain, PROMPTS, 14, **params)
    llm = LLM(folder, device="cpu", **LIMITS[name])
    llm.runner.buffers["attention"].fill_(torch.nan)  # what padding is left with
    recorder = Recorder(llm)
    for _ in range(3):
        assert generate(llm, PROMPTS, 14, **params) == expected
    assert llm.runner.graphs is not None
    captured = llm.runner.graphs.captured
    assert any(isinstance(key[0], StepSize) for key in captured)
    assert any(not isinstance(key[0], StepSize) for key in captured)
    assert recorder.replays > llm.engine.statistics.steps / 2
    if "few blocks" in name:
        assert llm.engine.statistics.preemptions > 0


def test_large_steps_that_only_prefill_are_captured_unpadded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "TOKENS", (8, 16))
    limits: dict[str, Any] = {"max_batched_tokens": 64}
    expected = generate(LLM(folder, device="cpu", graphs=False, **limits), PROMPTS, 3)
    llm = LLM(folder, device="cpu", **limits)
    Recorder(llm)
    for _ in range(3):
        assert generate(llm, PROMPTS, 3) == expected
    assert llm.runner.graphs is not None
    sizes = [key[0] for key in llm.runner.graphs.captured]
    large = [size for size in sizes if isinstance(size, StepSize) and size.tokens > 16]
    assert {size.decodes for size in large} == {0}


def test_greedy_decodes_store_no_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last product can find the largest logit by itself, unless someone asks for logits."""
    monkeypatch.setattr(gemm, "suits_argmax", lambda x: True)
    expected = generate(LLM(folder, device="cpu", graphs=False), PROMPTS, 14)
    llm = LLM(folder, device="cpu")
    Recorder(llm)
    assert generate(llm, PROMPTS, 14, logprobs=1) == expected
    assert generate(llm, PROMPTS, 14, temperature=0.9) != expected
    assert llm.runner.graphs is not None
    decodes = [key for key in llm.runner.graphs.captured if not isinstance(key[0], StepSize)]
    assert decodes
    assert not any(inside for _, _, inside, _ in decodes)
    assert generate(llm, PROMPTS, 14) == expected
    decodes = [key for key in llm.runner.graphs.captured if not isinstance(key[0], StepSize)]
    assert any(inside for _, _, inside, _ in decodes)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3}])
def test_norms_that_products_do_change_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    expected = generate(LLM(folder, device="cpu"), PROMPTS, 14, **params)
    chained = []
    monkeypatch.setattr(gemm, "suits_hopper", lambda x: True)
    monkeypatch.setattr(gemm, "norms_can_wait", lambda x, *_: chained.append(len(x)) or len(x) <= 100)
    llm = LLM(folder, device="cpu", max_batched_tokens=128)
    llm.runner.model.ops = ops  # the references of the kernels, and what calls them
    assert generate(llm, PROMPTS, 14, **params) == expected
    assert min(chained) <= 100 < max(chained)
    assert not llm.runner.buffers["row_words"].any()


def test_a_key_is_captured_when_it_comes_again_and_room_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    done: list[str] = []

    def capture(work: Work) -> Work:
        done.append("captured")
        return work

    step_graphs = StepGraphs(capture)
    for key in "aabaccb":
        step_graphs.run(key, lambda key=key: done.append(key))
    assert "".join(done).replace("captured", "+") == "a+abac+cb"
    assert list(step_graphs.captured) == ["a", "c"]


def test_sizes_that_came_once_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_SEEN", 3)
    step_graphs = StepGraphs(lambda work: work)
    for key in "abcdab":
        step_graphs.run(key, lambda: None)
    assert not step_graphs.captured
    step_graphs.run("b", lambda: None)
    assert list(step_graphs.captured) == ["b"]


@given(st.data())
def test_a_padded_size_holds_the_step_and_fits_the_buffers(data: st.DataObject) -> None:
    limits = Limits(data.draw(st.integers(1, 600)), data.draw(st.integers(600, 9000)), max_model_len=2048)
    decodes = data.draw(st.integers(0, limits.max_num_seqs - 1))
    lengths = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=limits.max_num_seqs - decodes))
    size = StepSize(decodes + sum(lengths), decodes, len(lengths), max(lengths))
    padded = padded_size(size, limits) if size.tokens <= limits.max_batched_tokens else None
    if padded is None:
        assert size.tokens > min(TOKENS[-1], limits.max_batched_tokens)
        return
    assert all(p >= s for p, s in zip(padded, size, strict=True))
    assert (padded.decodes == 0) == (size.decodes == 0)
    assert padded.tokens <= limits.max_batched_tokens
    assert padded.decodes <= min(padded.tokens, limits.max_num_seqs)
    assert padded.chunks <= limits.max_num_seqs
    assert padded.longest <= padded.tokens
    assert padded.tokens <= max(8, size.tokens + 127)
    assert padded_size(padded, limits) == padded
    assert size.decodes == 0 or size.decodes <= decode_bucket(size.decodes, limits) <= limits.max_num_seqs


def test_the_inputs_of_the_largest_step_fit_their_buffer() -> None:
    """All sections of an upload, each padded to 16 bytes."""
    for seqs, tokens in ((1, 1), (7, 7), (256, 8448), (300, 301)):
        limits = Limits(seqs, tokens, max_model_len=64)
        sections = [tokens] * 3 + [seqs] * 7 + [seqs + 1]
        needed = sum(-(-length // 4) * 4 for length in sections)
        assert plan_buffers(SHAPES["SmolLM2-135M"], limits, "float32")["step_inputs"].shape[0] >= needed


@pytest.mark.parametrize(
    ("contexts", "min_warps"),
    [([], 1), ([1000] * 30, 1), ([1000] * 29 + [1200], 1), ([100, 300], 1), ([300, 600], 4), ([600, 1200], 8)],
)
def test_more_warps_share_a_part_of_long_uneven_contexts(contexts: list[int], min_warps: int) -> None:
    assert decode_share(48, 8, np.array(contexts, np.int32)) == (3, min_warps)
