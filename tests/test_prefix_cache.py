"""What sequences with equal beginnings share: what is computed, found, kept, evicted and counted."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import numpy.typing as npt
import pytest

from tests.fake_runner import EOS, VOCAB, FakeRunner, plain_result
from tests.test_engine_random import CheckedScheduler
from tinyvllm_cli.engine.blocks import BlockPool
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.engine.scheduler import Scheduler
from tinyvllm_cli.engine.sequence import SamplingParams, Sequence
from tinyvllm_cli.engine.step_plan import StepPlan
from tinyvllm_cli.memory.plan import Limits

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


class Checked:
    """An engine whose plans, state and results are all looked at."""

    def __init__(
        self,
        *,
        rows: int = 8,
        budget: int = 256,
        model_len: int = 128,
        block_size: int = 4,
        blocks: int = 256,
        run_ahead: int = 1,
        prefix_cache: bool = True,
    ) -> None:
        self.limits = Limits(rows, budget, model_len, block_size)
        self.pool = BlockPool(blocks, block_size)
        self.runner = FakeRunner(self.limits, blocks, seed=1)
        scheduler = CheckedScheduler(self.limits, self.pool, prefix_cache)
        self.engine = Engine(scheduler, self.runner, run_ahead, [EOS])

    def add(self, prompt: list[int], params: SamplingParams = GREEDY) -> Sequence:
        return self.engine.add(prompt, params)

    def run(self, *prompts: list[int], params: SamplingParams = GREEDY) -> list[Sequence]:
        """Submits prompts at once and runs them to their end."""
        sequences = [self.add(prompt, params) for prompt in prompts]
        while self.engine.has_work:
            self.engine.step()
            self.pool.check()
        assert self.pool.num_used == 0
        for s in sequences:
            expected = plain_result(s.prompt_token_ids, s.params, self.limits.max_model_len)
            assert (s.output_token_ids, s.finish_reason) == expected
        return sequences

    @property
    def prefilled(self) -> int:
        """Tokens of prefills so far."""
        return sum(plan.num_tokens - plan.num_decodes for plan in self.runner.plans)


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def test_named_blocks_are_kept_until_their_space_is_needed() -> None:
    pool = BlockPool(4, 16)
    old, young = pool.allocate(2), pool.allocate(1)
    for block, name in zip([*old, *young], "abc", strict=True):
        pool.name(int(block), name)
    pool.free(old)
    pool.free(young)
    pool.check()
    assert (pool.num_free, pool.num_used) == (4, 0)
    assert [pool.find(name) for name in "abcd"] == [0, 1, 2, None]
    assert pool.num_unowned(old) == 2
    pool.share(old[:1])
    assert (pool.num_free, pool.num_unowned(old)) == (3, 1)
    assert pool.allocate(1).tolist() == [3]  # the empty one first
    assert pool.find("b") == 1
    assert pool.allocate(1).tolist() == [1]  # then the one kept for longest
    assert [pool.find(name) for name in "abc"] == [0, None, 2]
    pool.check()
    with pytest.raises(RuntimeError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)
    for block, name in ((0, "d"), (1, "a"), (2, "d")):
        with pytest.raises(RuntimeError, match="cannot be named"):  # it has one; the name is taken; it has no owner
            pool.name(block, name)
    pool._names[1] = "e"
    with pytest.raises(RuntimeError, match="names"):
        pool.check()


def test_the_end_of_a_sequence_is_forgotten_before_its_beginning() -> None:
    run = Checked(blocks=8, rows=1)
    prompt = tokens(25)
    run.run(prompt, params=ONE)  # seven blocks, of which six are full
    run.run(tokens(12, seed=1), params=ONE)  # three blocks, of which two are empty
    [again] = run.run(prompt, params=ONE)
    assert again.num_cached == 20


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16, 17])
def test_all_but_the_last_token_can_be_found(length: int) -> None:
    run = Checked()
    prompt = tokens(length)
    (first,) = run.run(prompt, params=ONE)
    (again,) = run.run(prompt, params=ONE)
    assert (first.num_cached, again.num_cached) == (0, (length - 1) // 4 * 4)
    assert run.prefilled == 2 * length - again.num_cached
    assert run.engine.statistics.cached_tokens == again.num_cached


def test_equal_blocks_behind_different_ones_are_not_the_same() -> None:
    run = Checked()
    a, b, c = run.run([1] * 4 + [2] * 5, [3] * 4 + [2] * 5, [2] * 9)
    assert [s.num_cached for s in (a, b, c)] == [0, 0, 0]
    [d] = run.run([3] * 4 + [2] * 4 + [1])
    assert d.num_cached == 8


def test_answers_are_found_too() -> None:
    """The next turn of a conversation begins with the last prompt and its answer, whose last token was not stored."""
    run = Checked(run_ahead=2)
    params = SamplingParams(max_tokens=11, ignore_eos=True)
    [first] = run.run(tokens(6), params=params)
    turn = first.prompt_token_ids + first.output_token_ids
    [second] = run.run(turn + tokens(3, seed=2))
    assert second.num_cached in (12, 16)  # 16 tokens are stored; when the row is left, some are not known yet


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
@pytest.mark.parametrize("budget", [8, 16, 512, 10_000])
@pytest.mark.parametrize("submitted", ["at once", "one by one"])
def test_prompts_that_begin_alike_compute_it_once(budget: int, run_ahead: int, submitted: str) -> None:
    run = Checked(budget=budget, run_ahead=run_ahead, blocks=512)
    common = tokens(64)
    prompts = [common + tokens(1 + i, seed=i) for i in range(20)]
    sequences = run.run(*prompts) if submitted == "at once" else [run.run(prompt)[0] for prompt in prompts]
    assert all(s.num_cached >= 64 for s in sequences[1:])
    assert run.prefilled == sum(map(len, prompts)) - run.engine.statistics.cached_tokens
    assert run.prefilled <= 64 + sum(1 + i for i in range(20))


class InstantRunner:
    """Every token is 7."""

    def __init__(self) -> None:
        self.counts: deque[int] = deque()

    def launch(self, plan: StepPlan) -> None:
        self.counts.append(len(plan.sample_seqs))

    def collect(self) -> npt.NDArray[np.int32]:
        return np.full(self.counts.popleft(), 7, dtype=np.int32)


@pytest.mark.parametrize("budget", [8, 512, 8192])
def test_a_thousand_prompts_cost_their_common_prefix_once(budget: int) -> None:
    """2,000 common tokens and 16 of their own each: of 2,016,000 tokens 18,000 are computed, 112 times fewer."""
    limits = Limits(max_num_seqs=min(budget, 256), max_batched_tokens=budget, max_model_len=2048, block_size=16)
    engine = Engine(Scheduler(limits, BlockPool(3000, 16), prefix_cache=True), InstantRunner(), run_ahead=1)
    common = tokens(2000)
    for i in range(1000):
        engine.add([*common, i, *tokens(15, seed=i)], ONE)
    while engine.has_work:
        engine.step()
    assert engine.statistics.prompt_tokens == 1000 * 2016
    assert engine.statistics.cached_tokens == 999 * 2000
    assert engine.statistics.computed_tokens == 2000 + 1000 * 16


def test_the_second_prompt_joins_in_the_step_that_computes_the_first() -> None:
    run = Checked()
    common = tokens(16)
    run.add([*common, 1, 2])
    run.add([*common, 3])
    run.engine.step()
    [plan] = run.runner.plans
    assert plan.query_start.tolist() == [0, 18, 19]
    assert plan.context_lens.tolist() == [18, 17]
    run.run()


def test_a_prefix_in_the_making_is_waited_for() -> None:
    """With 8 tokens a step the first prompt takes three steps; the second begins in its last."""
    run = Checked(budget=8, run_ahead=0)
    common = tokens(16)
    run.add([*common, 1, 2])
    second = run.add([*common, 3])
    begun = []
    for _ in range(3):
        run.engine.step()
        begun.append(second.num_cached)
    assert begun == [None, None, 16]
    assert [plan.num_tokens for plan in run.runner.plans] == [8, 8, 3]
    run.run()


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    run = Checked(blocks=16, rows=2, run_ahead=0, prefix_cache=True)
    plain = Checked(blocks=16, rows=2, run_ahead=0, prefix_cache=False)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for one in (run, plain):
        one.run(tokens(5, seed=1), tokens(5, seed=2), params=params)
        assert one.engine.statistics.preemptions > 0
        assert one.engine.statistics.cached_tokens == 0  # no prompt was found: it is the answers that come again
    assert run.engine.statistics.computed_tokens < plain.engine.statistics.computed_tokens


def test_kept_blocks_make_nobody_wait() -> None:
    """A pool full of kept blocks is as good as an empty one."""
    steps = []
    for warm in (False, True):
        run = Checked(blocks=32, rows=4)
        if warm:
            run.run(*(tokens(31, seed=9 + i) for i in range(8)), params=ONE)
        before = len(run.runner.plans)
        run.run(*(tokens(20, seed=i) for i in range(4)))
        steps.append(len(run.runner.plans) - before)
        assert run.engine.statistics.preemptions == 0
    assert steps[0] == steps[1]


def test_shared_blocks_that_run_need_no_room() -> None:
    """40 blocks hold four prompts of 23 blocks of which 20 are common."""
    run = Checked(blocks=40, rows=4, model_len=120)
    common = tokens(80)
    run.run(*(common + tokens(12, seed=i) for i in range(4)), params=ONE)
    assert len(run.runner.plans) == 1


def test_without_the_cache_only_relatives_share() -> None:
    run = Checked(prefix_cache=False)
    prompt = tokens(10)
    first, second = run.run(prompt, prompt)
    assert (first.num_cached, second.num_cached) == (0, 0)
    one = run.add(prompt)
    two = run.engine.add(prompt, GREEDY, one)
    run.run()
    assert (one.num_cached, two.num_cached) == (0, 8)
    [last] = run.run(prompt)
    assert last.num_cached == 0


def test_a_decode_does_nothing_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the steps of many decodes whose cost on the host counts, also while others wait for blocks."""
    run = Checked(blocks=17, rows=4, model_len=64)
    run.run(*(tokens(20, seed=i) for i in range(4)))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for i in range(3):
        run.add(tokens(20, seed=10 + i), params)
    run.engine.step()
    run.engine.step()
    assert (run.engine.scheduler.num_running, run.engine.scheduler.num_waiting) == (2, 1)
    with monkeypatch.context() as patch:
        for name in ("find", "add"):
            patch.setattr(f"tinyvllm_cli.engine.prefix_cache.PrefixCache.{name}", None)
        for _ in range(8):
            run.engine.step()
    run.run()


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_of_a_prefill_that_is_broken_off_only_what_was_computed_is_found(run_ahead: int) -> None:
    run = Checked(budget=10, run_ahead=run_ahead)
    prompt = tokens(40)
    first = run.add(prompt)
    run.engine.step()
    run.engine.step()
    run.engine.abort(first.seq_id)
    [second] = run.run(prompt)
    assert second.num_cached == 20


@pytest.mark.parametrize("count", [4, 8, 12, 16])
def test_a_block_behind_a_forgotten_one_is_not_found_behind_its_successor(count: int) -> None:
    run = Checked(blocks=6, rows=1, model_len=24, run_ahead=0)
    prompt, other = tokens(8), tokens(16, seed=5)
    run.run(prompt, params=ONE)  # keeps two blocks
    [longer] = run.run(prompt, params=SamplingParams(max_tokens=6, ignore_eos=True))  # and a third behind them
    third = longer.output_token_ids[:4]
    run.run(other, params=ONE)  # takes the three empty blocks, and the second one, which was kept for longest
    [last] = run.run([*other[:count], *third, 1], params=ONE)
    assert last.num_cached == count
