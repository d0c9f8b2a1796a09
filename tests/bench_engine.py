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


def make_engine(rows: int, model_len: int, run_ahead: int) -> Engine:
    """An engine whose cache never runs out."""
    limits = Limits(max_num_seqs=rows, max_batched_tokens=8192, max_model_len=model_len, block_size=16)
    scheduler = Scheduler(limits, BlockPool(rows * limits.blocks_per_seq, limits.block_size))
    return Engine(scheduler, InstantRunner(rows), run_ahead, eos_token_ids=[2])


def steady_decode(rows: int, steps: int) -> tuple[float, float]:
    """Median microseconds of schedule() and of update() while `rows` sequences of 100 to 1,023 tokens decode."""
    engine = make_engine(rows, 2048 + 2 * steps, run_ahead=0)
    rng = random.Random(0)
    for _ in range(rows):
        engine.add([5] * rng.randint(100, 1023), SamplingParams(max_tokens=512 + 2 * steps))
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


def mixed_job(rows: int) -> tuple[int, float]:
    """Steps, and mean microseconds a step, of `rows` prompts of 100 to 1,024 tokens with as many outputs each."""
    engine = make_engine(rows, 4096, run_ahead=1)
    rng = random.Random(0)
    for _ in range(rows):
        prompt = [rng.randrange(10_000) for _ in range(rng.randint(100, 1024))]
        engine.add(prompt, SamplingParams(max_tokens=rng.randint(100, 1024), ignore_eos=True))
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    steps = engine.statistics.steps
    return steps, 1e6 * (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    planning, updating = steady_decode(args.rows, args.steps)
    print(f"{args.rows} decodes: schedule() {planning:.1f} us, update() {updating:.1f} us a step")
    steps, mean = mixed_job(args.rows)
    print(f"{args.rows} prompts of 100 to 1,024 tokens, as many outputs: {steps} steps, Engine.step() {mean:.1f} us")


if __name__ == "__main__":
    main()
