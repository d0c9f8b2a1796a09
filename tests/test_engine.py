"""The engine's parts, and the corners of running ahead, each by a small example."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fake_runner import EOS, VOCAB, FakeRunner, next_token, plain_result
from tinyvllm_cli.engine.blocks import BlockPool
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.engine.scheduler import Scheduler
from tinyvllm_cli.engine.sequence import FinishEvent, SamplingParams, Sequence, Status, TokenEvent
from tinyvllm_cli.errors import UserError
from tinyvllm_cli.memory.plan import Limits

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


def make_engine(
    *, rows: int = 4, budget: int = 64, model_len: int = 64, block_size: int = 4, blocks: int = 64, run_ahead: int = 0
) -> tuple[Engine, FakeRunner]:
    limits = Limits(rows, budget, model_len, block_size)
    runner = FakeRunner(limits, blocks)
    return Engine(Scheduler(limits, BlockPool(blocks, block_size)), runner, run_ahead, [EOS]), runner


def finish_all(engine: Engine) -> None:
    for _ in range(10_000):
        if not engine.has_work:
            assert engine.scheduler.pool.num_used == 0
            return
        engine.step()
        engine.scheduler.pool.check()
    raise AssertionError("no end")


def expect_plain(sequence: Sequence, model_len: int = 64) -> None:
    outputs = plain_result(sequence.prompt_token_ids, sequence.params, model_len)
    assert (sequence.output_token_ids, sequence.finish_reason) == outputs


def prompt_before_eos(outputs: int) -> list[int]:
    """A prompt whose greedy continuation has its first EOS as output number `outputs`."""
    for first in range(10_000):
        prompt = [first % VOCAB, first // VOCAB]
        found, reason = plain_result(prompt, SamplingParams(max_tokens=outputs), 64)
        if reason == "stop" and len(found) == outputs:
            return prompt
    raise AssertionError("none found")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("stop_token_ids", (5, -1)),
        ("stop", ["a", ""]),
        ("n", 0),
        ("n", 257),
        ("n", 2),  # at temperature 0
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 10**400),
        ("presence_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_sampling_params_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=name) as error:
        SamplingParams(**{name: value})
    assert str(value) in error.value.what
    assert error.value.fix


def test_block_pool_hands_out_shares_and_takes_back() -> None:
    pool = BlockPool(5, 16)
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    blocks = pool.allocate(3)
    assert blocks.tolist() == [0, 1, 2]
    pool.share(blocks[:2])
    pool.free(blocks)
    assert pool.num_used == 2
    pool.check()
    again = pool.allocate(3)
    assert sorted(again.tolist()) == [2, 3, 4]
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 free"):
        pool.allocate(1)
    pool.free(blocks[:2])
    pool.free(again)
    pool.check()
    assert pool.num_free == 5


def test_block_pool_notices_what_must_not_be() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(RuntimeError, match="free block"):
        pool.free(blocks[:1])
    with pytest.raises(RuntimeError, match="empty block"):
        pool.share(blocks[:1])
    pool._num_empty -= 1
    with pytest.raises(RuntimeError, match="disagree"):
        pool.check()


def test_the_plans_of_a_small_job() -> None:
    engine, runner = make_engine(rows=2, budget=6, block_size=4)
    first = engine.add([10, 11, 12, 13], SamplingParams(max_tokens=3, seed=7))
    engine.add([5, 6, 7, 8, 9], SamplingParams(max_tokens=2, ignore_eos=True))
    finish_all(engine)
    assert first.output_token_ids == [next_token([10, 11, 12, 13], first.params), *first.output_token_ids[1:]]

    fill, mixed, late, *rest = runner.plans
    assert [len(rest), fill.step, mixed.step, late.step] == [0, 0, 1, 2]
    # The first prompt, and what the budget leaves of the second.
    assert fill.num_decodes == 0
    assert fill.rows.tolist() == [0, 1]
    assert fill.query_start.tolist() == [0, 4, 6]
    assert fill.context_lens.tolist() == [4, 2]
    assert fill.token_ids.tolist() == [10, 11, 12, 13, 5, 6]
    assert fill.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert fill.slots.tolist() == [0, 1, 2, 3, 4, 5]
    assert [fill.sample_seqs.tolist(), fill.sample_tokens.tolist(), fill.sample_positions.tolist()] == [[0], [3], [4]]
    assert fill.block_updates.tolist() == [[0, 0, 0], [1, 0, 1], [1, 1, 2]]
    assert fill.row_updates == ((0, first.params), (1, SamplingParams(max_tokens=2, ignore_eos=True)))
    assert not fill.is_decode_only
    # The first decodes into a new block; the second's last chunk goes beside it, and samples.
    assert mixed.num_decodes == 1
    assert mixed.token_ids.tolist() == [-1, 7, 8, 9]
    assert mixed.positions.tolist() == [4, 2, 3, 4]
    assert mixed.slots.tolist() == [12, 6, 7, 8]
    assert mixed.context_lens.tolist() == [5, 5]
    assert mixed.sample_tokens.tolist() == [0, 3]
    assert mixed.block_updates.tolist() == [[0, 1, 3]]
    assert mixed.row_updates == ()
    # Both decode; then both are at their end.
    assert late.is_decode_only
    assert late.rows.tolist() == [0, 1]
    assert late.sample_positions.tolist() == [6, 6]
    assert len(late.block_updates) == 0


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("prompt", [3, 4, 5, 8, 12])
def test_no_step_is_launched_past_the_end(prompt: int, run_ahead: int) -> None:
    engine, runner = make_engine(block_size=4, blocks=4, run_ahead=run_ahead)
    sequence = engine.add(range(prompt), SamplingParams(max_tokens=5, ignore_eos=True))
    finish_all(engine)
    expect_plain(sequence)
    assert len(runner.plans) == 5
    assert sum(len(p.block_updates) for p in runner.plans) == -(-(prompt + 4) // 4)


def test_model_length_limits_prompt_and_outputs() -> None:
    engine, runner = make_engine(model_len=64)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    longest = engine.add([1] * 63, params)
    cut = engine.add([1] * 60, params)
    for length in (64, 65):
        with pytest.raises(UserError, match=f"{length} tokens.*max_model_len 64.*at most 63"):
            engine.add([1] * length, params)
    with pytest.raises(UserError, match="no tokens"):
        engine.add([], params)
    finish_all(engine)
    assert [longest.max_outputs, cut.max_outputs] == [1, 4]
    for sequence in (longest, cut):
        expect_plain(sequence)
        assert sequence.finish_reason == "length"
    assert max(p.context_lens.max() for p in runner.plans) == 63


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    engine, _ = make_engine(block_size=4, blocks=6)
    engine.add([1] * 17, GREEDY)  # the last token is not stored: 24 tokens, 6 blocks
    with pytest.raises(UserError, match=r"prompt of 18 tokens and up to 8 new ones need 7 KV-cache blocks.*; 6 are"):
        engine.add([1] * 18, GREEDY)
    finish_all(engine)
    engine, _ = make_engine(blocks=0)
    with pytest.raises(UserError, match="0 are available"):
        engine.add([1], GREEDY)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_prompts_that_do_not_fit_together_all_finish(run_ahead: int) -> None:
    engine, runner = make_engine(rows=8, blocks=6, block_size=2, run_ahead=run_ahead)
    sequences = [engine.add([i, i + 1], SamplingParams(max_tokens=11, ignore_eos=True)) for i in range(8)]
    finish_all(engine)
    for sequence in sequences:
        expect_plain(sequence)
    assert engine.statistics.preemptions > 0
    assert sum(len(p.sample_seqs) for p in runner.plans) == 88  # recomputed prefixes give new tokens, none twice


def test_the_youngest_is_preempted_and_comes_back_when_its_tokens_are_known() -> None:
    engine, runner = make_engine(rows=3, blocks=6, block_size=2, run_ahead=2)
    old, young = (engine.add([i], SamplingParams(max_tokens=9, ignore_eos=True)) for i in (1, 2))
    while engine.statistics.preemptions == 0:
        engine.step()
    assert [old.status, young.status, young.row] == [Status.RUNNING, Status.WAITING, -1]
    launched = young.num_launched
    assert launched > len(young.output_token_ids)
    third = engine.add([3], GREEDY)
    seen = len(runner.plans)
    finish_all(engine)
    again = next(p for p in runner.plans[seen:] if p.row_updates)
    start, end = again.query_start[again.num_decodes : again.num_decodes + 2]
    assert again.token_ids[start:end].tolist() == [2, *young.output_token_ids[: end - start - 1]]
    assert end - start == 1 + launched
    for sequence in (old, young, third):
        expect_plain(sequence)


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_an_end_seen_late_discards_what_was_launched_beyond(run_ahead: int) -> None:
    engine, runner = make_engine(rows=1, run_ahead=run_ahead)
    stopping = engine.add(prompt_before_eos(3), SamplingParams(max_tokens=30))
    following = engine.add([9, 9], GREEDY)
    events = []
    while engine.has_work:
        events += engine.step()
    for sequence in (stopping, following):
        expect_plain(sequence)
    told = [e.token_id for e in events if isinstance(e, TokenEvent) and e.seq_id == stopping.seq_id]
    assert told == stopping.output_token_ids[:2]
    assert stopping.output_token_ids[2] == EOS
    assert [(e.seq_id, e.reason, e.sequence) for e in events if isinstance(e, FinishEvent)] == [
        (0, "stop", stopping),
        (1, "length", following),
    ]
    assert len(runner.plans) == 3 + run_ahead + 8
    assert engine.statistics.output_tokens == 3 + 8


def test_eos_as_the_last_token_allowed_is_a_stop() -> None:
    engine, _ = make_engine()
    sequence = engine.add(prompt_before_eos(4), SamplingParams(max_tokens=4))
    finish_all(engine)
    assert sequence.finish_reason == "stop"


def test_stop_tokens_work_beside_and_without_eos() -> None:
    prompt = prompt_before_eos(5)
    outputs, _ = plain_result(prompt, SamplingParams(max_tokens=20, ignore_eos=True), 64)
    for params in (
        SamplingParams(max_tokens=20, stop_token_ids=(outputs[1],)),
        SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(outputs[6],)),
        SamplingParams(max_tokens=20, ignore_eos=True),
    ):
        engine, _ = make_engine(run_ahead=1)
        sequence = engine.add(prompt, params)
        finish_all(engine)
        expect_plain(sequence)


@pytest.mark.parametrize("steps", range(9))
def test_abort_at_any_time_leaves_the_others_alone(steps: int) -> None:
    engine, _ = make_engine(rows=2, budget=4, run_ahead=2)
    sequences = [engine.add([i] * 5, SamplingParams(max_tokens=4, ignore_eos=True)) for i in range(4)]
    told = []
    for _ in range(steps):
        told += engine.step()
    aborted = [engine.abort(i) for i in (1, 3)]
    while engine.has_work:
        for event in engine.step():
            assert event.seq_id in (0, 2)
    assert engine.scheduler.pool.num_used == 0
    assert engine.abort(0) is None
    for sequence in (sequences[0], sequences[2]):
        expect_plain(sequence)
    for sequence in aborted:
        if sequence is not None:
            assert (sequence.status, sequence.finish_reason) == (Status.FINISHED, "abort")
            assert [e.token_id for e in told if e.seq_id == sequence.seq_id] == sequence.output_token_ids


def test_a_sequence_whose_last_step_is_launched_can_still_be_finished() -> None:
    engine, _ = make_engine(rows=1, run_ahead=2)
    sequence = engine.add([1], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.step()
    engine.step()
    assert engine.scheduler.num_running == 0
    assert sequence.status is Status.RUNNING
    assert engine.finish(sequence.seq_id) is sequence
    assert engine.has_work
    finish_all(engine)
    assert (sequence.finish_reason, sequence.output_token_ids) == ("stop", [])
    with pytest.raises(RuntimeError, match="already finished"):
        engine.scheduler.finish(sequence, "stop")


def test_a_long_prompt_does_not_stop_the_decodes() -> None:
    engine, runner = make_engine(budget=8, model_len=64, run_ahead=1)
    engine.add([1, 2], SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    long = engine.add([5] * 40, GREEDY)
    finish_all(engine)
    expect_plain(long)
    mixed = [p for p in runner.plans if 0 < p.num_decodes < p.num_seqs]
    assert [p.num_tokens for p in mixed] == [8, 8, 8, 8, 8, 6]
    assert all(p.num_decodes == 1 for p in mixed)
    assert [len(p.sample_seqs) for p in mixed] == [1, 1, 1, 1, 1, 2]


def test_a_steady_decode_changes_as_little_as_possible() -> None:
    engine, runner = make_engine(rows=4, block_size=4, model_len=64)
    for i in range(4):
        engine.add([i] * (4 + i), SamplingParams(max_tokens=17, ignore_eos=True))
    finish_all(engine)
    decodes = runner.plans[1:]
    assert all(p.rows is decodes[0].rows and not p.row_updates for p in decodes)
    assert [len(p.block_updates) for p in decodes] == [1] * 16


def test_an_engine_without_work_does_nothing() -> None:
    engine, runner = make_engine()
    assert not engine.has_work
    assert engine.step() == []
    assert runner.plans == []


def test_faults_of_the_program_are_not_passed_over() -> None:
    engine, runner = make_engine()
    engine.add([1], GREEDY)
    engine.scheduler.pool.allocate(64)
    with pytest.raises(RuntimeError, match="no sequence can run"):
        engine.step()

    engine, runner = make_engine(run_ahead=1)
    engine.add([1], GREEDY)
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan is not None
    with pytest.raises(RuntimeError, match="not what is awaited for step 0"):
        engine.scheduler.update(plan, np.zeros(1, dtype=np.int32))
    assert len(runner.plans) == 1
