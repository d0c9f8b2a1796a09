"""The prefix cache through the whole model: tokens are those of a run without it, and the oracle's.

On CUDA (bf16) a prompt's last part computed alone rounds otherwise than the whole prompt at once; see test_model.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
from test_model import Case, Tokens, case, generate, random_prompts

from tinyvllm_cli.bench.session import Session
from tinyvllm_cli.bench.workloads import Request, Workload, workload_case
from tinyvllm_cli.engine.sequence import SamplingParams
from tinyvllm_cli.llm import LLM

__all__ = ["case"]  # the fixture

LIMITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks of 8": {"max_batched_tokens": 8, "max_num_seqs": 4},
    "chunks of 16": {"max_batched_tokens": 16, "max_num_seqs": 4},
    "chunks of 512": {"max_batched_tokens": 512},
    "one at once": {"max_num_seqs": 1},
    "blocks of 1": {"block_size": 1},
    "few blocks": {"num_kv_blocks": 24, "block_size": 8},
    "few blocks, chunks, two steps ahead": {
        "num_kv_blocks": 24, "block_size": 8, "max_batched_tokens": 16, "max_num_seqs": 8, "run_ahead": 2,
    },
    "no graphs": {"graphs": False},
}  # fmt: skip
ROUNDS = 2
"""Each job is done so many times, so that the later ones find what the earlier ones have left."""


@pytest.fixture(scope="module")
def alike(case: Callable[..., Case]) -> Case:
    """Prompts with 48 tokens in common: multiples of the block sizes, equal ones, one that others begin with."""
    made = case("alike", [48, 1, 7, 16, 16, 33], 24)
    common, *tails = made.prompts
    prompts = [common, *(common + tail for tail in tails), common + tails[2], common[:20], common]
    expected, gaps = models.oracle_steps(made.folder, prompts, 24)
    assert min(map(min, gaps)) > 0.0005
    return Case(made.folder, prompts, expected, gaps, made.rounding)


@pytest.mark.parametrize("name", LIMITS)
def test_tokens_are_equal_with_and_without(device: str, alike: Case, name: str) -> None:
    computed = []
    for prefix_cache in (True, False):
        llm = LLM(alike.folder, device=device, prefix_cache=prefix_cache, **LIMITS[name])
        for _ in range(ROUNDS):
            alike.check(generate(llm, alike.prompts, 24), device)
        statistics = llm.engine.statistics
        computed.append(statistics.computed_tokens)
        assert (statistics.cached_tokens > 0) == prefix_cache
        assert (statistics.preemptions > 0) == name.startswith("few blocks")
    assert computed[0] < 0.8 * computed[1]


def test_a_conversation_goes_on_from_its_last_answer(device: str, alike: Case) -> None:
    """Each turn begins with all before it; only its new tokens are computed, and the end of the last answer."""
    llm, plain = (LLM(alike.folder, device=device, prefix_cache=cached) for cached in (True, False))
    conversation: list[int] = []
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for turn in random_prompts([33, 20, 40], seed=3):
        conversation += turn
        before = llm.engine.statistics.computed_tokens
        [answer] = generate(llm, [conversation], params.max_tokens)
        new = llm.engine.statistics.computed_tokens - before - (params.max_tokens - 1)
        assert new <= len(turn) + 2 * llm.limits.block_size
        if device == "cpu":
            assert [answer] == generate(plain, [conversation], params.max_tokens)
        conversation += answer


def test_what_was_evicted_is_computed_again(device: str, alike: Case) -> None:
    llm = LLM(alike.folder, device=device, num_kv_blocks=32, block_size=4, max_model_len=128)
    others: Tokens = random_prompts([100] * 3, seed=9)
    for _ in range(3):
        alike.check(generate(llm, alike.prompts[:1], 24), device, [0])
        generate(llm, others, 4)
    assert llm.engine.statistics.cached_tokens == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_bench_tells_what_was_found(device: str, alike: Case, prefix_cache: bool) -> None:
    """20 prompts of 40 tokens with 32 in common; each repetition has new ones."""
    work = workload_case(Workload("w", (Request(40, 4),) * 20, common_tokens=32), 8)
    session = Session(alike.folder, device, [work], {"prefix_cache": prefix_cache})
    result = session.measure(work, 2)
    assert result.error is None
    assert result.cached_share == (19 * 32 / (20 * 40) if prefix_cache else 0)
