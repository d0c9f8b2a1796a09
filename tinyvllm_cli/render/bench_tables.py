"""What the tables of `bench` say: facts, columns and rows as text, whatever they are shown in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinyvllm_cli.render.console import one_line

if TYPE_CHECKING:
    from tinyvllm_cli.bench.kernels import KernelResult
    from tinyvllm_cli.bench.result import Result
    from tinyvllm_cli.commands.bench import BenchResult

Rows = list[tuple[str, ...]]
COLUMNS = ("Test", "tok/s", "ms/step", "p99", "Work", "Ceiling", "Memory")
KERNEL_COLUMNS = ("Op", "Weight", "Tokens", "Context", "us", "Work", "Ceiling")
TARGET_COLUMNS = ("Row", "Measured", "Floor", "Must", "Aim", "Peer", "x peer", "Met")


def label(result: Result) -> str:
    """What a row measures, in a few words: prompts x tokens @ tokens before them."""
    if result.name:
        return result.name
    if result.test == "prefill":
        return f"prefill {result.batch}x{result.prompt_tokens}" + (f"@{result.depth}" if result.depth else "")
    return f"decode {result.batch}x{result.generated_tokens}@{result.depth + result.prompt_tokens}"


def summary(result: Result) -> str:
    """The row's main numbers on one line."""
    words = [f"{_number(result.ms)} ms"]
    if result.tokens_per_second is not None:
        words = [f"{_rate(result)} tok/s", *words, f"{_number(result.ms_per_step)} ms a step"]
    if result.share_of_ceiling is not None:
        words.append(f"{result.share_of_ceiling:.1%} of the ceiling")
    if result.cached_share:
        words.append(f"{result.cached_share:.1%} of the prompts' tokens cached")
    if result.latency:
        first = result.latency["time_to_first_token_ms"]
        words.append(f"first token p50 {_number(first['p50'])} ms, p99 {_number(first['p99'])} ms")
        if "time_between_tokens_ms" in result.latency:
            words.append(f"tokens apart p99 {_number(result.latency['time_between_tokens_ms']['p99'])} ms")
    if result.target:
        words.append(
            f"must {result.target['must']}, aim {result.target['aim'] or 'none'}, met: {_verdict(result.target)}"
        )
    return ", ".join(words)


def _rate(result: Result | dict[str, Any]) -> str:
    row = result if isinstance(result, dict) else result.to_json()
    return f"{_number(row['tokens_per_second'])} ±{row['tokens_per_second_std'] / row['tokens_per_second']:.1%}"


def _number(value: float | None) -> str:
    """With as many decimals as the size needs: 0.613, 6.13, 61.3, 61,300."""
    if value is None:
        return ""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3}f}"


def _work(gb_per_second: float | None, tflop_per_second: float | None, bound: str) -> str:
    """What was achieved of what bounds it."""
    if bound == "compute" and tflop_per_second is not None:
        return f"{tflop_per_second:.3g} TF/s" if tflop_per_second >= 1 else f"{1e3 * tflop_per_second:.3g} GF/s"
    return "" if gb_per_second is None else f"{_number(gb_per_second)} GB/s"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _row(result: Result) -> tuple[str, ...]:
    if result.error is not None:
        return (label(result), "failed", "", "", "", "", "")
    return (
        label(result),
        _rate(result),
        _number(result.ms_per_step),
        _number(result.ms_per_step_p99),
        _work(result.gb_per_second, result.tflop_per_second, result.bound),
        _percent(result.share_of_ceiling),
        f"{result.peak_memory / 2**30:.1f}G",
    )


def _kernel_row(kernel: KernelResult) -> tuple[str, ...]:
    return (
        kernel.op,
        kernel.what,
        f"{kernel.tokens:,}",
        f"{kernel.context:,}" if kernel.context else "",
        _number(kernel.us),
        _work(kernel.gb_per_second, kernel.tflop_per_second, kernel.bound),
        _percent(kernel.share_of_ceiling),
    )


def _verdict(target: dict[str, Any]) -> str:
    if "value" not in target:
        return "failed"
    return "aim" if target["meets_aim"] else "must" if target["meets_must"] else "neither"


def _target_row(result: Result) -> tuple[str, ...]:
    target = result.target or {}
    unit = {"ms_per_step": "ms", "ms": "ms", "tokens_per_second": "tok/s"}[target["unit"]]
    value = _number(target.get("value"))
    numbers = (_number(target[key]) for key in ("floor", "must", "aim", "peer"))
    times = f"{target['times_peer']:.2f}" if target.get("times_peer") else ""
    return (result.name, f"{value} {unit}", *numbers, times, _verdict(target))


def peer_words(peer: dict[str, Any]) -> str:
    return f"{_rate(peer)} tok/s; tinyvllm is {peer['ratio']:.2f} times as fast"


def _peer_rows(result: BenchResult) -> Rows:
    return [
        (label(row), peer["name"], peer.get("version", ""), *_peer_cells(peer))
        for row in result.results
        for peer in row.peers
    ]


def _peer_cells(peer: dict[str, Any]) -> tuple[str, str]:
    return ("no", one_line(peer["error"], 60)) if "error" in peer else (f"{peer['ratio']:.2f}", _rate(peer))


def _baseline_rows(result: BenchResult) -> Rows:
    words = {True: "yes", False: "no", None: "cannot tell (one sample)"}
    return [
        (
            label(row),
            f"{_number(row.baseline['tokens_per_second'])} tok/s",
            f"{row.baseline['speedup'] - 1:+.1%}",
            f"±{max(row.baseline['noise'], 0.01):.1%}",
            words[row.baseline["beyond_noise"]],
        )
        for row in result.results
        if row.baseline
    ]


def _latency_rows(result: BenchResult) -> Rows:
    return [
        (
            label(row),
            f"{row.rate:g}/s" if row.rate else "",
            name.removesuffix("_ms").replace("_", " "),
            *map(_number, values.values()),
        )
        for row in result.results
        for name, values in (row.latency or {}).items()
    ]


def sections(result: BenchResult) -> list[tuple[str, tuple[str, ...], Rows]]:
    """Heading, columns and rows of every table that has rows."""
    decode = [_kernel_row(k) for k in result.kernels if k.phase == "decode"]
    tests = [_row(row) for row in result.results if row.test != "start"]
    prefill = [_kernel_row(k) for k in result.kernels if k.phase == "prefill"]
    sections = [
        ("Results (prompts x tokens @ tokens before them)", COLUMNS, tests),
        ("Ops of a decode step", KERNEL_COLUMNS, decode),
        ("Ops of a prefill", KERNEL_COLUMNS, prefill),
        ("Latency, ms", ("Test", "Rate", "", "p50", "p90", "p99"), _latency_rows(result)),
        ("Targets", TARGET_COLUMNS, [_target_row(row) for row in result.results if row.target]),
        ("Peers at the same work", ("Test", "Peer", "Version", "Ratio", "tok/s"), _peer_rows(result)),
        ("Against the baseline", ("Test", "Then", "Speed", "Noise", "Beyond"), _baseline_rows(result)),
    ]
    return [section for section in sections if section[2]]


def facts_of(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """What the numbers are of."""
    weights = ", random weights" if environment["random_weights"] else ""
    facts = [
        ("Model", f"{environment['model']}{weights}, {environment['dtype']}"),
        ("Machine", machine(environment)),
        ("Versions", f"tinyvllm {environment['tinyvllm']} ({environment['commit'] or 'no commit'}), "
         f"torch {environment['packages']['torch']}"),
        ("Date", environment["date"]),
    ]  # fmt: skip
    if "card" in environment:
        facts[2] = ("Versions", f"{facts[2][1]}, CUDA {environment['cuda']}, driver {environment['driver']}")
    ceiling = environment["ceiling"]
    if ceiling:
        reading, rate = ceiling["read_bytes_per_second"] / 1e9, ceiling["matmul_flops_per_second"] / 1e12
        facts.append(("Ceiling", f"{reading:,.1f} GB/s reading, {rate:,.3g} TFLOP/s {ceiling['matmul_dtype']} matmul"))
    settings = environment["settings"]
    warmup = "warm-up before each" if settings["warmup"] else "no warm-up"
    cache = "with the" if settings["prefix_cache"] else "no"
    facts.append(("Samples", f"{settings['repetitions']} a row, {warmup}; fresh random prompts, {cache} prefix cache"))
    return facts


def machine(environment: dict[str, Any]) -> str:
    """The card, or the processor and its threads."""
    return str(environment.get("card") or f"{environment['cpu']}, {environment['torch_threads']} threads")
