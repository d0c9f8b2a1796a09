"""Random jobs within random limits, against what each sequence gives alone; the runner answers late."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fake_runner import EOS, VOCAB, FakeRunner, fake_logprobs, plain_result
from tinyvllm_cli.engine.blocks import BlockPool
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.engine.scheduler import Scheduler
from tinyvllm_cli.engine.sequence import FinishEvent, SamplingParams, Sequence, Status, TokenEvent
from tinyvllm_cli.engine.step_plan import StepPlan
from tinyvllm_cli.errors import UserError
from tinyvllm_cli.memory.plan import Limits


class CheckedScheduler(Scheduler):
    """Looks at its own state before and after each plan."""

    def schedule(self) -> StepPlan | None:
        oldest = min((*self._running, *self._waiting), key=lambda s: s.seq_id, default=None)
        running = list(self._running)
        plan = super().schedule()
        self.check(plan)
        in_plan = set(self._launched[-1].sampled) if plan else set()
        rows = set(plan.rows.tolist()) if plan else set()
        if oldest is not None:
            on_its_way = len(oldest.output_token_ids) < oldest.num_launched
            waits = oldest not in running and on_its_way
            assert waits or oldest in in_plan or oldest.row in rows, "the oldest sequence was left out"
        for sequence in self._running:
            if sequence in running:
                assert sequence.row in rows, "a running sequence was left out of a step"
        return plan

    def check(self, plan: StepPlan | None) -> None:
        self.pool.check()
        owners: Counter[int] = Counter()
        for s in self._running:
            blocks = self._table[s.row, : self._num_blocks[s.row]].tolist()
            assert len(set(blocks)) == len(blocks)
            owners.update(blocks)
        assert len(owners) == self.pool.num_used
        assert all(self.pool._owners[b] == count for b, count in owners.items())
        for s in self._running:
            assert self.pool.blocks_for(int(self._num_computed[s.row])) <= self._num_blocks[s.row]
            assert s.status is Status.RUNNING
        assert sorted(self._free_rows + [s.row for s in self._running]) == list(range(self.limits.max_num_seqs))
        ids = [s.seq_id for s in (*self._running, *self._waiting)]
        assert ids == sorted(ids)
        assert all(s.status is Status.WAITING and s.row == -1 for s in self._waiting)
        if plan is not None:
            launched = self._launched[-1]
            for s, position in zip(launched.sampled, plan.sample_positions, strict=True):
                outputs = int(position) + 1 - len(s.prompt_token_ids)
                assert outputs <= s.max_outputs, "launched past the end"
                assert (s in launched.ended) == (outputs == s.max_outputs)


@dataclass(frozen=True)
class Request:
    """A prompt, when it arrives, and when (if ever) it is taken back, in steps; and its family, if it has one."""

    prompt: list[int]
    params: SamplingParams
    arrival: int
    taken_back: int | None
    family: int | None = None


Job = tuple[Limits, int, int, list[Request]]
"""Limits, blocks in the pool, run_ahead, requests."""
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@st.composite
def requests(draw: st.DrawFn, max_model_len: int) -> Request:
    longest = draw(st.sampled_from([max_model_len // 4 + 1, max_model_len + 1]))
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=longest))
    params = SamplingParams(
        max_tokens=draw(st.integers(1, max_model_len)),
        seed=draw(st.integers(0, 3)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (), (1,), (0, 5)])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
        logprobs=draw(st.sampled_from([None, None, 0, 3, 20])),
    )
    arrival = draw(st.integers(0, 6) | st.integers(0, 40))
    stays = draw(st.integers(0, 4)) > 0
    return Request(prompt, params, arrival, None if stays else arrival + draw(st.integers(0, 21)))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    rows = draw(st.integers(1, 5))
    limits = Limits(
        max_num_seqs=rows,
        max_batched_tokens=rows + draw(st.integers(0, 20)),
        max_model_len=draw(st.integers(2, 40)),
        block_size=draw(st.integers(1, 4) | st.integers(1, 16)),
    )
    enough_for_one = limits.blocks_per_seq
    num_blocks = draw(st.integers(enough_for_one, 2 * enough_for_one) | st.integers(1, rows * enough_for_one))
    job = draw(st.lists(requests(limits.max_model_len), min_size=1, max_size=14))
    return limits, num_blocks, draw(st.integers(0, 3)), job


@st.composite
def tight_jobs(draw: st.DrawFn) -> Job:
    """Few blocks, much to do from the start: preemption is the rule."""
    limits = Limits(
        max_num_seqs=draw(st.integers(2, 6)),
        max_batched_tokens=draw(st.integers(6, 40)),
        max_model_len=draw(st.integers(12, 40)),
        block_size=draw(st.integers(1, 5)),
    )
    num_blocks = limits.blocks_per_seq + draw(st.integers(0, 3))
    prompts = draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8), min_size=3, max_size=10))
    job = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=draw(st.integers(4, 40)), seed=i, ignore_eos=draw(st.integers(0, 3)) > 0)
        stays = draw(st.integers(0, 7)) > 0
        job.append(Request(prompt, params, 0, None if stays else draw(st.integers(0, 60))))
    return limits, num_blocks, draw(st.integers(0, 3)), job


@st.composite
def family_jobs(draw: st.DrawFn) -> Job:
    """Several sequences of each prompt, with little room for them; some come when others have gone."""
    limits, num_blocks, run_ahead, prompts = draw(jobs() | tight_jobs())
    job = []
    for family, request in enumerate(prompts[:6]):
        for sample in range(draw(st.integers(1, 5))):
            params = replace(request.params, seed=sample, max_tokens=draw(st.integers(1, request.params.max_tokens)))
            arrival = request.arrival + draw(st.sampled_from([0, 0, 0, 1, 5, 30]))
            taken_back = None if draw(st.integers(0, 4)) else arrival + draw(st.integers(0, 20))
            job.append(Request(request.prompt, params, arrival, taken_back, family))
    return limits, num_blocks, run_ahead, job


@st.composite
def alike_jobs(draw: st.DrawFn) -> Job:
    """Prompts that begin alike, and go on with what others were answered; some come again when all is forgotten."""
    limits, num_blocks, run_ahead, requests = draw(jobs() | tight_jobs())
    trunks = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=2))
    job = []
    for request in requests:
        trunk = draw(st.sampled_from(trunks))
        beginning = trunk[: draw(st.integers(0, len(trunk)))]
        if draw(st.booleans()):
            beginning = beginning[: limits.max_model_len // 2] or [1]
            beginning += plain_result(beginning, request.params, limits.max_model_len)[0]
        prompt = beginning + draw(st.sampled_from([[], [], request.prompt[:1], request.prompt]))
        arrival = request.arrival + draw(st.sampled_from([0, 0, 0, 5, 60]))
        job.append(replace(request, prompt=prompt[: limits.max_model_len - 1] or [0], arrival=arrival))
    return limits, num_blocks, run_ahead, job


@given(jobs(), st.integers(0, 1000), st.booleans())
@settings(max_examples=400, deadline=None, suppress_health_check=SLOW)
def test_any_job_gives_what_each_sequence_gives_alone(job: Job, seed: int, prefix_cache: bool) -> None:
    run(job, seed, prefix_cache)


@given(tight_jobs(), st.integers(0, 1000), st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
def test_preemption_changes_no_result(job: Job, seed: int, prefix_cache: bool) -> None:
    run(job, seed, prefix_cache)


@given(family_jobs(), st.integers(0, 1000), st.booleans())
@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
def test_sharing_a_prompt_changes_no_result(job: Job, seed: int, prefix_cache: bool) -> None:
    run(job, seed, prefix_cache)


@given(alike_jobs(), st.integers(0, 1000))
@settings(max_examples=400, deadline=None, suppress_health_check=SLOW)
def test_sharing_beginnings_changes_no_result(job: Job, seed: int) -> None:
    run(job, seed, prefix_cache=True)


def run(job: Job, seed: int, prefix_cache: bool) -> None:
    """Does the job, looking at everything on the way, and compares with `plain_result`."""
    limits, num_blocks, run_ahead, all_requests = job
    pool = BlockPool(num_blocks, limits.block_size)
    runner = FakeRunner(limits, num_blocks, seed)
    engine = Engine(CheckedScheduler(limits, pool, prefix_cache), runner, run_ahead, eos_token_ids=[EOS])
    accepted: dict[int, Request] = {}
    sequences: dict[int, Sequence] = {}
    told: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    taken_back: set[int] = set()
    families: dict[int | None, Sequence] = {}
    bound = 40 + max(r.arrival for r in all_requests)
    bound += sum(len(r.prompt) + 2 * r.params.max_tokens + run_ahead + 3 for r in all_requests)
    arrivals = sorted(all_requests, key=lambda r: r.arrival)
    clock = 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0].arrival <= clock:
            request = arrivals.pop(0)
            total = min(len(request.prompt) + request.params.max_tokens, limits.max_model_len)
            if len(request.prompt) >= limits.max_model_len or pool.blocks_for(total - 1) > num_blocks:
                with pytest.raises(UserError):
                    engine.add(request.prompt, request.params)
            else:
                sequence = engine.add(request.prompt, request.params, families.get(request.family))
                if request.family is not None:
                    families[request.family] = sequence
                accepted[sequence.seq_id], sequences[sequence.seq_id] = request, sequence
                told[sequence.seq_id] = []
        for seq_id, request in accepted.items():
            if request.taken_back == clock and engine.abort(seq_id):
                taken_back.add(seq_id)
        for event in engine.step():
            assert event.seq_id not in reasons
            assert event.seq_id not in taken_back
            if isinstance(event, TokenEvent):
                told[event.seq_id].append(event.token_id)
            else:
                assert isinstance(event, FinishEvent)
                reasons[event.seq_id] = event.reason
        pool.check()
        clock += 1
        assert clock <= bound, "it does not come to an end"

    assert pool.num_free == num_blocks
    assert engine.num_unfinished == engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    for seq_id, request in accepted.items():
        sequence = sequences[seq_id]
        outputs, reason = plain_result(request.prompt, request.params, limits.max_model_len)
        if seq_id in taken_back:
            assert sequence.finish_reason == "abort"
            assert sequence.output_token_ids == outputs[: len(sequence.output_token_ids)]
            assert told[seq_id] == sequence.output_token_ids
        else:
            assert (sequence.output_token_ids, sequence.finish_reason) == (outputs, reason)
            assert reasons[seq_id] == reason
            assert told[seq_id] == (outputs[:-1] if reason == "stop" else outputs)
        count = request.params.logprobs
        expected = [] if count is None else [fake_logprobs(token, count) for token in sequence.output_token_ids]
        assert sequence.output_logprobs == expected
    statistics = engine.statistics
    assert statistics.steps == len(runner.plans)
    assert statistics.computed_tokens == sum(p.num_tokens for p in runner.plans)
    assert statistics.output_tokens == sum(len(s.output_token_ids) for s in sequences.values())
    if not taken_back and all(r == "length" for r in reasons.values()):
        assert sum(len(p.sample_seqs) for p in runner.plans) == statistics.output_tokens, "a row-step was wasted"
