"""What a step costs the host, in microseconds, by its parts; no model is computed. `python tests/bench_engine.py`

The demo's tokenizer, scheduler, engine and runner are the real ones; but the runner's graphs do nothing, so that every
token is the same one, and the device takes no time. What CUDA calls cost comes on top of `launch`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.commands.model import DEMO, resolve_model
from tinyvllm_cli.engine.blocks import BlockPool
from tinyvllm_cli.engine.engine import Engine
from tinyvllm_cli.engine.scheduler import Scheduler
from tinyvllm_cli.engine.sequence import SamplingParams
from tinyvllm_cli.engine.step_plan import StepPlan
from tinyvllm_cli.generation import Requests
from tinyvllm_cli.llm import LLM
from tinyvllm_cli.memory.plan import Limits
from tinyvllm_cli.model.graphs import StepGraphs, Work

PARTS = ("schedule", "launch", "collect", "update", "events")
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "text at the end": ({}, False),
    "stop strings": ({"stop": ["\n\n", "User:", "</answer>"]}, False),
    "streamed": ({}, True),
    "penalties": ({"repetition_penalty": 1.1}, False),
}
"""By name: parameters of the requests, and whether their text is streamed."""


class NoGraphs(StepGraphs):
    """Takes every step for done."""

    def __init__(self) -> None:
        super().__init__(lambda work: work)

    def run(self, key: Hashable, work: Work) -> None:
        pass


def decoding(rows: int, steps: int, kind: str, prefix_cache: bool = False) -> tuple[LLM, Requests]:
    """The demo, and `rows` requests to it that will decode for `steps` steps."""
    llm = LLM(resolve_model(DEMO).path, device="cpu", max_num_seqs=rows, max_batched_tokens=1024,
              prefix_cache=prefix_cache)  # fmt: skip
    llm.runner.graphs = NoGraphs()
    for name in ("normed", "logits"):  # what the steps that are not done would fill
        llm.runner.buffers[name].zero_()
    llm.runner.sampled.fill_(llm.tokenizer.encode(" a", add_special_tokens=False)[-1])
    requests = Requests(llm.engine, llm.tokenizer, llm.config.eos_token_ids)
    options, streams = KINDS[kind]
    params = SamplingParams(max_tokens=steps + 8, ignore_eos=True, **options)
    for i in range(rows):
        requests.add([5 + i % 7] * (1 + i % 3), params, streams=streams)
    for _ in range(4):
        requests.step()  # until all of them decode
    return llm, requests


def decode(rows: int, steps: int, kind: str, prefix_cache: bool) -> dict[str, float]:
    """Median microseconds of each part, and of the whole step, while `rows` requests decode."""
    llm, requests = decoding(rows, steps, kind, prefix_cache)
    spent: dict[str, list[float]] = {name: [] for name in ("step", *PARTS)}
    for owner, name in ((llm.engine.scheduler, "schedule"), (llm.engine.scheduler, "update"),
                        (llm.runner, "launch"), (llm.runner, "collect")):  # fmt: skip
        setattr(owner, name, timed(getattr(owner, name), spent[name]))
    step = timed(requests.step, spent["step"])
    for _ in range(steps):
        step()
    times = {name: 1e6 * statistics.median(values) for name, values in spent.items() if values}
    return times | {"events": times["step"] - sum(times[name] for name in PARTS if name in times)}


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = function(*arguments)
        spent.append(time.perf_counter() - began)
        return result

    return call


def prefill(tokens: int, repetitions: int, prefix_cache: bool) -> tuple[float, float]:
    """Median microseconds of add() and of schedule() of one prompt."""
    engine = make_engine(rows=256, model_len=tokens + 1, run_ahead=0, prefix_cache=prefix_cache)
    adding: list[float] = []
    planning: list[float] = []
    engine.scheduler.schedule = timed(engine.scheduler.schedule, planning)
    add = timed(engine.add, adding)
    rng = random.Random(0)
    for _ in range(repetitions):
        add([rng.randrange(100_000) for _ in range(tokens)], SamplingParams(max_tokens=1))
        engine.step()
    return 1e6 * statistics.median(adding), 1e6 * statistics.median(planning)


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prefix-cache", action="store_true")
    args = parser.parse_args(arguments)
    print(f"{args.rows} decodes, us a step".ljust(28) + "".join(name.rjust(10) for name in (*PARTS, "step")))
    for kind in KINDS:
        times = decode(args.rows, args.steps, kind, args.prefix_cache)
        print(f"  {kind}".ljust(28) + "".join(f"{times[name]:10.1f}" for name in (*PARTS, "step")))
    for tokens in (128, 512, 2048, 8192):
        adding, planning = prefill(tokens, max(args.steps // 3, 1), args.prefix_cache)
        print(f"a prompt of {tokens} tokens: add() {adding:.1f} us, schedule() {planning:.1f} us")
    steps, mean = mixed_job(args.rows, args.prefix_cache)
    print(f"{args.rows} prompts of 100 to 1,024 tokens, as many outputs: {steps} steps, Engine.step() {mean:.1f} us")
    steps, seconds = alike_job(args.rows, args.prefix_cache)
    print(f"1,000 prompts of 2,016 tokens, 2,000 in common: {steps} steps, {seconds:.3f} s")


if __name__ == "__main__":
    main()
