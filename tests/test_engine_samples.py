"""Several samples of one prompt: their seeds, and how they share the prompt's blocks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.test_engine import GREEDY, expect_plain, finish_all, make_engine
from tinyvllm_cli.engine.sequence import SamplingParams
from tinyvllm_cli.errors import UserError


def test_samples_differ_by_their_seeds() -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=2**63 - 2, stop="a", stop_token_ids=[7])
    assert (params.stop, params.stop_token_ids) == (("a",), (7,))
    assert [params.of_sample(i).seed for i in range(3)] == [2**63 - 2, 2**63 - 1, 0]
    assert params.of_sample(1) == SamplingParams(temperature=1.0, seed=2**63 - 1, stop=["a"], stop_token_ids=(7,))


def test_whole_numbers_may_be_numpys_and_no_fractions() -> None:
    params = SamplingParams(n=np.int32(2), max_tokens=np.int64(3), temperature=1.0, seed=np.int64(2**63 - 1))
    assert params.of_sample(1) == SamplingParams(max_tokens=3, temperature=1.0, seed=0)
    assert type(params.of_sample(1).seed) is int
    for name in ("n", "max_tokens", "top_k", "seed", "logprobs"):
        for value in (1.5, "1"):
            with pytest.raises(UserError, match=f"^{name} is {value!r}\n{name} must be an integer"):
                SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_a_family_computes_its_prompt_once() -> None:
    """18 tokens in blocks of 4: four blocks are shared, the 2 tokens behind them are computed by each."""
    engine, runner = make_engine(rows=5, budget=40, block_size=4)
    first = engine.add([7] * 18, SamplingParams(max_tokens=3, ignore_eos=True))
    family = [
        first,
        *(engine.add([7] * 18, SamplingParams(max_tokens=3 + i, ignore_eos=True, seed=i), first) for i in (1, 2)),
    ]
    engine.step()
    assert engine.scheduler.pool.num_used == 4 + 3
    assert runner.plans[0].query_start.tolist() == [0, 18, 20, 22]
    while not first.finish_reason:
        engine.step()
    late = engine.add([7] * 18, SamplingParams(max_tokens=2, ignore_eos=True, seed=9), first)
    later = engine.add([7] * 18, SamplingParams(max_tokens=2, ignore_eos=True, seed=10), family[1])
    finish_all(engine)
    for sequence in (*family, late, later):
        expect_plain(sequence)
    with pytest.raises(RuntimeError, match="same prompt"):
        engine.add([8], GREEDY, first)


def test_a_prompt_that_fills_its_blocks_is_shared_but_for_the_last() -> None:
    """The last token must be computed: there is nothing to sample from otherwise."""
    engine, runner = make_engine(rows=2, block_size=4)
    first = engine.add([5] * 8, GREEDY)
    engine.add([5] * 8, GREEDY, first)
    finish_all(engine)
    assert runner.plans[0].query_start.tolist() == [0, 8, 12]
