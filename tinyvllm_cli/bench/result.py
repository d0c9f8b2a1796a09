"""Result: one row, its raw samples and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.bench.stats import percentile, std

if TYPE_CHECKING:
    from tinyvllm_cli.bench.traffic import Ceiling, Work
    from tinyvllm_cli.bench.workloads import Case


@dataclass(slots=True)
class Result:
    """One row.

    Attributes:
        test, batch, depth, prompt_tokens, generated_tokens: as in `Case`.
        samples: seconds, one a repetition. prefill: until the output tokens are there; decode: of all decode steps;
            workload: from the first submission to the last token; start: until what is started is ready.
        discarded: differences of two times that noise has made negative, not among the samples.
        counted_tokens: tokens behind each sample: prompt tokens for prefill, else generated ones.
        tokens_per_second, tokens_per_second_std: mean and deviation of counted_tokens / sample.
        ms: median of the samples, in milliseconds.
        steps: engine steps in a sample. ms_per_step: median over the samples of sample / steps.
        ms_per_step_p99: of single steps, from one to the next.
        bytes, flops, floor_ms: the least work, and what it would take at this machine's ceiling.
        gb_per_second, tflop_per_second: the least work by the median time.
        share_of_ceiling: floor / median time; None without a ceiling. bound: "memory" or "compute".
        peak_memory: bytes; of the device on CUDA, of the process so far on the CPU.
        cached_share: of the prompts' tokens, those that were found in the prefix cache.
        latency: with arrival rates, milliseconds at p50, p90, p99: to the first token, between tokens, whole requests.
        target: the suite's row: floor, peer, must, aim, unit, value.
        peers: seconds and tokens of others at the same work.
        error: why there are no samples.
    """

    test: str
    batch: int
    prompt_tokens: int
    generated_tokens: int
    depth: int = 0
    name: str = ""
    samples: list[float] = field(default_factory=list)
    discarded: int = 0
    counted_tokens: int = 0
    tokens_per_second: float | None = None
    tokens_per_second_std: float | None = None
    ms: float | None = None
    steps: int = 0
    ms_per_step: float | None = None
    ms_per_step_p99: float | None = None
    bytes: float = 0.0
    flops: float = 0.0
    bound: str = ""
    floor_ms: float | None = None
    gb_per_second: float | None = None
    tflop_per_second: float | None = None
    share_of_ceiling: float | None = None
    peak_memory: int = 0
    preemptions: int = 0
    cached_share: float = 0.0
    rate: float | None = None
    latency: dict[str, dict[str, float]] | None = None
    target: dict[str, Any] | None = None
    peers: list[dict[str, Any]] = field(default_factory=list)
    baseline: dict[str, Any] | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def empty_result(case: Case) -> Result:
    rate = case.workload.rate if case.workload else None
    return Result(
        case.test, case.batch, case.prompt_tokens, case.generated_tokens, case.depth, name=case.name, rate=rate
    )


def summarize(result: Result, intervals: Sequence[float], work: Work, ceiling: Ceiling | None) -> None:
    """Fills in what follows from the samples."""
    median = statistics.median(result.samples)
    rates = [result.counted_tokens / seconds for seconds in result.samples]
    result.tokens_per_second, result.tokens_per_second_std = statistics.fmean(rates), std(rates)
    result.ms, result.ms_per_step = 1e3 * median, 1e3 * median / result.steps
    result.ms_per_step_p99 = 1e3 * percentile(intervals, 99) if intervals else None
    result.bytes, result.flops = work.nbytes, work.flops
    result.gb_per_second, result.tflop_per_second = work.nbytes / median / 1e9, work.flops / median / 1e12
    if ceiling is not None:
        floor = work.floor(ceiling)
        result.floor_ms, result.share_of_ceiling = 1e3 * floor, floor / median
        result.bound = "memory" if work.is_memory_bound(ceiling) else "compute"
