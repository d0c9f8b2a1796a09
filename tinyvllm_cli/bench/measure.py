"""Timing cases through the engine: wall clock, with scheduling, sampling and all host work inside."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyvllm_cli.bench.result import Result, empty_result, summarize
from tinyvllm_cli.bench.stats import percentile
from tinyvllm_cli.bench.traffic import Ceiling, Model
from tinyvllm_cli.bench.workloads import Case, Request, random_ids
from tinyvllm_cli.engine.sequence import SamplingParams, TokenEvent
from tinyvllm_cli.errors import UserError

if TYPE_CHECKING:
    from tinyvllm_cli.llm import LLM

WARMUP_STEPS = 8
"""Decode steps of a warm-up: enough to capture the graph and to replay it."""
BAD_SAMPLES = 10
"""So many differences of two times may be lost in noise before a case is given up."""
PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Run:
    """What one run through the engine took: seconds, the time of each step's end, tokens of each request."""

    seconds: float = 0.0
    step_ends: list[float] = field(default_factory=list)
    steps: int = 0
    outputs: list[list[int]] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    request: list[float] = field(default_factory=list)


class Meter:
    """Times cases on a model.

    Args:
        llm: sized for all cases.
        ceiling: None leaves shares out.
        seed: of the prompts; each run draws new ones.
        warmup: runs before the samples of each case; without, only what a difference begins with is run once.
    """

    def __init__(self, llm: LLM, ceiling: Ceiling | None, *, seed: int = 0, warmup: bool = True) -> None:
        self.llm = llm
        self.ceiling = ceiling
        self.warmup = warmup
        self._rng = np.random.default_rng(seed)
        self._swapped = False
        itemsize = {"float32": 4}.get(llm.dtype, 2)
        self._model = Model(llm.config, itemsize)

    def measure(self, case: Case, repetitions: int, budget_s: float = float("inf")) -> Result:
        """Warm-up, then `repetitions` samples; fewer, but at least one, once `budget_s` seconds are spent."""
        began = time.perf_counter()
        result = empty_result(case)
        self._swapped = False
        self._start_peak()
        if self.warmup:
            short = replace(case, generated_tokens=min(case.generated_tokens, WARMUP_STEPS))
            for _ in range(1 if case.workload and not case.workload.interference else 2):
                self._sample(case if case.workload else short)  # a step of any size is captured when it comes again
        elif case.test == "decode":  # a difference of two runs: what the first one pays must not count
            self._run_alike(case.batch, case.depth + case.prompt_tokens, 1)
        before = replace(self.llm.engine.statistics)
        intervals: list[float] = []
        latencies: list[Run] = []
        while len(result.samples) < repetitions:
            seconds, steps, run = self._sample(case)
            if seconds <= 0:  # a difference of two times that are nearly equal
                result.discarded += 1
                if result.discarded == BAD_SAMPLES:
                    raise UserError(
                        "the difference of two times is lost in the noise", fix="Measure more tokens (-n, -p)."
                    )
                continue
            result.samples.append(seconds)
            result.steps = steps
            intervals += np.diff(run.step_ends[-steps - 1 :]).tolist()
            latencies.append(run)
            if time.perf_counter() - began > budget_s:
                break
        done = self.llm.engine.statistics
        result.preemptions = done.preemptions - before.preemptions
        result.cached_share = (done.cached_tokens - before.cached_tokens) / (done.prompt_tokens - before.prompt_tokens)
        result.peak_memory = self._peak()
        result.counted_tokens = (
            case.generated_tokens
            if case.workload
            else case.batch * (case.prompt_tokens if case.test == "prefill" else case.generated_tokens)
        )
        result.latency = _latency(latencies) or None
        ceiling = None if result.latency else self.ceiling  # with arrivals the time is not the machine's alone
        summarize(result, intervals, self._model.of(case, result.cached_share > 0), ceiling)
        return result

    def _sample(self, case: Case) -> tuple[float, int, Run]:
        """Seconds and engine steps of one repetition, and the run that they come from."""
        if case.workload is not None:
            params = [
                SamplingParams(
                    max_tokens=r.generated_tokens, temperature=case.workload.temperature, seed=i, ignore_eos=True
                )
                for i, r in enumerate(case.workload.requests)
            ]
            prompts = [self._prompt(r, case.workload.max_id) for r in case.workload.requests]
            common = prompts[0][: case.workload.common_tokens]
            for prompt in prompts:
                prompt[: len(common)] = common
            arrivals = self._arrivals(len(prompts), case.workload.rate)
            if case.workload.interference:
                arrivals = [0.0] * (len(prompts) - 1) + [float("inf")]
            run = self.run(prompts, params, arrivals)
            return run.seconds, run.steps, run
        length = case.depth + case.prompt_tokens
        if case.test == "decode":
            first, run = self._two_runs((length, 1), (length, case.generated_tokens + 1), case.batch)
            return run.seconds - first.seconds, case.generated_tokens, run
        if not case.depth:
            run = self._run_alike(case.batch, length, 1)
            return run.seconds, run.steps, run
        before, run = self._two_runs((case.depth, 1), (length, 1), case.batch)
        return run.seconds - before.seconds, max(run.steps - before.steps, 1), run

    def _two_runs(self, a: tuple[int, int], b: tuple[int, int], batch: int) -> tuple[Run, Run]:
        """Runs of (length of the prompts, tokens wanted), for the difference of their times.

        In turn the one or the other comes first, so that before both of them the same has run: behind a prefill a GPU
        at its power limit is slower for a while than behind decode steps.
        """
        runs = {}
        for length, wanted in (b, a) if self._swapped else (a, b):
            runs[length, wanted] = self._run_alike(batch, length, wanted)
        self._swapped = not self._swapped
        return runs[a], runs[b]

    def run(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], arrivals: Sequence[float] | None = None
    ) -> Run:
        """Submits the prompts, at once or at their `arrivals`, and runs them to their end.

        Arrivals are in seconds from now, ascending; infinity for the last one means when all the others decode, and
        that only what comes from then to its first token counts for latencies.
        """
        engine, result = self.llm.engine, Run()
        before, clock = engine.statistics.steps, time.perf_counter
        start = clock()
        if arrivals is None:
            sequences = [engine.add(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
            while engine.has_work:
                engine.step()
                result.step_ends.append(clock())
        else:
            sequences = self._run_arrivals(prompts, params, [start + a for a in arrivals], result)
        result.seconds = clock() - start
        result.steps = engine.statistics.steps - before
        result.outputs = [sequence.output_token_ids for sequence in sequences]
        wanted, got = sum(p.max_tokens for p in params), sum(map(len, result.outputs))
        if got != wanted:
            raise RuntimeError(f"{got} tokens came back, {wanted} were asked for")
        return result

    def _run_arrivals(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], due: list[float], result: Run
    ) -> list[Any]:
        engine, clock, count = self.llm.engine, time.perf_counter, len(prompts)
        interference = due[-1] == float("inf")
        sequences: list[Any] = []
        arrived: dict[int, float] = {}
        last: dict[int, float] = {}
        while engine.has_work or len(sequences) < count:
            while len(sequences) < count and due[len(sequences)] <= clock():
                i = len(sequences)
                sequences.append(engine.add(prompts[i], params[i]))
                arrived[sequences[i].seq_id] = due[i]
            if not engine.has_work:
                time.sleep(max(due[len(sequences)] - clock(), 0.0))
                continue
            events = engine.step()
            now = clock()
            result.step_ends.append(now)
            counts = not interference or len(last) < len(sequences) == count
            for event in events:
                if isinstance(event, TokenEvent):
                    before, last[event.seq_id] = last.get(event.seq_id), now
                    if counts and before is None:
                        result.first_token.append(now - arrived[event.seq_id])
                    elif counts and before is not None:
                        result.between_tokens.append(now - before)
                elif counts:
                    result.request.append(now - arrived[event.seq_id])
            if interference and due[-1] > now and len(last) == count - 1:
                due[-1] = now
        return sequences

    def _run_alike(self, batch: int, length: int, wanted: int) -> Run:
        """`batch` prompts of `length` tokens, and so many wanted of each."""
        return self.run(self._prompts(batch, length), [SamplingParams(max_tokens=wanted, ignore_eos=True)] * batch)

    def _prompts(self, batch: int, length: int) -> list[list[int]]:
        return [random_ids(self._rng, length, self.llm.config.vocab_size) for _ in range(batch)]

    def _prompt(self, request: Request, max_id: int | None) -> list[int]:
        vocab = self.llm.config.vocab_size
        if any(token >= vocab for token in request.token_ids):
            raise UserError(f"a token id of the workload is outside of the model's vocabulary of {vocab}")
        return list(request.token_ids) or random_ids(self._rng, request.prompt_tokens, min(max_id or vocab, vocab))

    def _arrivals(self, count: int, rate: float | None) -> list[float] | None:
        """Arrival times of a Poisson process of `rate` requests a second, the first at 0."""
        if rate is None:
            return None
        gaps = self._rng.exponential(1 / rate, size=count)
        times: list[float] = (np.cumsum(gaps) - gaps[0]).tolist()
        return times

    def _start_peak(self) -> None:
        if self.llm.device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self.llm.device)

    def _peak(self) -> int:
        if self.llm.device.type == "cuda":
            import torch

            return int(torch.cuda.max_memory_allocated(self.llm.device))
        return peak_host_memory()


def peak_host_memory() -> int:
    """Most bytes that this process has had in memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _latency(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Milliseconds at p50, p90, p99 over all requests of all repetitions."""
    kinds: dict[str, Callable[[Run], list[float]]] = {
        "time_to_first_token_ms": lambda run: run.first_token,
        "time_between_tokens_ms": lambda run: run.between_tokens,
        "request_ms": lambda run: run.request,
    }
    latency = {}
    for name, of in kinds.items():
        values = [value for run in runs for value in of(run)]
        if values:
            latency[name] = {f"p{p}": 1e3 * percentile(values, p) for p in PERCENTILES}
    return latency
