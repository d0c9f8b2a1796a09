"""What the engine costs the host, in microseconds a step; the runner answers at once. `python tests/bench_engine.py`"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.engine.blocks import BlockPool
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.engine.scheduler import Scheduler
from tinyvllm_cli.engine.sequence import SamplingParams
from tinyvllm_cli.engine.step_plan import StepPlan
from tinyvllm_cli.memory.plan import Limits


class InstantRunner:
    """Costs nothing: every token is 7."""

    def __init__(self, rows: int) -> None:
        self.tokens = np.full(rows, 7, dtype=np.int32)
        self.counts: deque[int] = deque()

    def launch(self, plan: StepPlan) -> None:
        self.counts.append(len(plan.sample_seqs))

    def collect(self) -> npt.NDArray[np.int32]:
        return self.tokens[: self.counts.popleft()]


def make_engine(rows: int, model_len: int, run_ahead: int, prefix_cache: bool) -> Engine:
    """An engine whose cache never runs out."""
    limits = Limits(max_num_seqs=rows, max_batched_tokens=8192, max_model_len=model_len, block_size=16)
    scheduler = Scheduler(limits, BlockPool(rows * limits.blocks_per_seq, limits.block_size), prefix_cache)
    return Engine(scheduler, InstantRunner(rows), run_ahead, eos_token_ids=[2])


def steady_decode(rows: int, steps: int, prefix_cache: bool) -> tuple[float, float]:
    """Median microseconds of schedule() and of update() while `rows` sequences of 100 to 1,023 tokens decode."""
    engine = make_engine(rows, 2048 + 2 * steps, run_ahead=0, prefix_cache=prefix_cache)
    rng = random.Random(0)
    for _ in range(rows):
        engine.add(rng.choices(range(10_000), k=rng.randint(100, 1023)), SamplingParams(max_tokens=512 + 2 * steps))
    for _ in range(100):
        engine.step()  # until all of them decode
    scheduler, runner = engine.scheduler, engine.runner
    planning, updating = [], []
    for _ in range(steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        assert plan is not None
        assert plan.num_decodes == rows == plan.num_tokens
        runner.launch(plan)
        tokens = runner.collect()
        collected = time.perf_counter()
        scheduler.update(plan, tokens)
        planning.append(planned - start)
        updating.append(time.perf_counter() - collected)
    return 1e6 * statistics.median(planning), 1e6 * statistics.median(updating)


def mixed_job(rows: int, prefix_cache: bool) -> tuple[int, float]:
    """Steps, and mean microseconds a step, of `rows` prompts of 100 to 1,024 tokens with as many outputs each."""
    engine = make_engine(rows, 4096, run_ahead=1, prefix_cache=prefix_cache)
    rng = random.Random(0)
    for _ in range(rows):
        prompt = [rng.randrange(10_000) for _ in range(rng.randint(100, 1024))]
        engine.add(prompt, SamplingParams(max_tokens=rng.randint(100, 1024), ignore_eos=True))
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    steps = engine.statistics.steps
    return steps, 1e6 * (time.perf_counter() - start) / steps


def alike_job(rows: int, prefix_cache: bool) -> tuple[int, float]:
    """Steps and seconds of 1,000 prompts of 2,016 tokens, 2,000 of them in common, with one output each."""
    engine = make_engine(rows, 4096, run_ahead=1, prefix_cache=prefix_cache)
    rng = random.Random(0)
    common = rng.choices(range(10_000), k=2000)
    prompts = [common + rng.choices(range(10_000), k=16) for _ in range(1000)]
    start = time.perf_counter()
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=1))
    while engine.has_work:
        engine.step()
    return engine.statistics.steps, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--prefix-cache", action="store_true")
    args = parser.parse_args()
    planning, updating = steady_decode(args.rows, args.steps, args.prefix_cache)
    print(f"{args.rows} decodes: schedule() {planning:.1f} us, update() {updating:.1f} us a step")
    steps, mean = mixed_job(args.rows, args.prefix_cache)
    print(f"{args.rows} prompts of 100 to 1,024 tokens, as many outputs: {steps} steps, Engine.step() {mean:.1f} us")
    steps, seconds = alike_job(args.rows, args.prefix_cache)
    print(f"1,000 prompts of 2,016 tokens, 2,000 in common: {steps} steps, {seconds:.3f} s")


if __name__ == "__main__":
    main()
