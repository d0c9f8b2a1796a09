"""`tinyvllm bench`: options in, measurements out. Nothing is printed here; a sink is told what happens."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tinyvllm_cli.bench import environment, suite
from tinyvllm_cli.bench.baseline import differences, mark_changes, read_baseline
from tinyvllm_cli.bench.ceiling import measure_ceiling
from tinyvllm_cli.bench.compare import check_peer, compare
from tinyvllm_cli.bench.kernels import KernelResult, measure_kernels
from tinyvllm_cli.bench.result import Result, empty_result
from tinyvllm_cli.bench.session import Session, choose_device, torch_device
from tinyvllm_cli.bench.shapes import find_shape
from tinyvllm_cli.bench.traffic import Ceiling
from tinyvllm_cli.bench.workloads import Case, find_workload, grid, with_rate, workload_case
from tinyvllm_cli.checkpoint.config import ModelConfig, read_config
from tinyvllm_cli.commands.interrupt import unwinding
from tinyvllm_cli.commands.model import DEMO, resolve_model
from tinyvllm_cli.errors import ExitCode, UserError

DEFAULT_SHAPE = "Llama-3.2-1B"
DEFAULTS: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {"prompts": (512, 2048), "generated": (128,), "batches": (1, 8, 64), "depths": (0,), "repetitions": (5,)},
    "cpu": {"prompts": (128,), "generated": (32,), "batches": (1, 8), "depths": (0,), "repetitions": (5,)},
}
UNASKED_SECONDS = 8.0
"""Without -r, a row takes no further sample after so many seconds."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the command line says; None takes the default of the device.

    Attributes:
        model: a checkpoint, as for `resolve_model`; shape: random weights, as for `find_shape`.
        prompts, generated, batches, depths: lengths and sizes of the tests; see `grid`.
        repetitions: samples of each row; None also lets a slow row have fewer.
        workload: as for `find_workload`, in place of the tests; rate: its arrivals a second.
        suite: "targets", in place of the tests; only: words, one of which a row's name must contain.
        kernels: time every op alone at the tests' shapes, in place of the tests; stages: only those of `decode_step`.
        compare: peers that do the same work afterwards; see `PEERS`.
        baseline: JSON of an earlier run.
        warmup: a run of each case before its samples.
        seed: of prompts and arrivals.
        device, dtype: as for `LLM`.
        engine: further arguments of `LLM`, by name.
    """

    model: str | None = None
    shape: str | None = None
    prompts: tuple[int, ...] | None = None
    generated: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    depths: tuple[int, ...] | None = None
    repetitions: int | None = None
    workload: str | None = None
    rate: float | None = None
    suite: str | None = None
    only: tuple[str, ...] = ()
    kernels: bool = False
    stages: bool = False
    compare: tuple[str, ...] = ()
    baseline: Path | None = None
    warmup: bool = True
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class BenchResult:
    """`environment`: where, on what and how; `results`: one a row; `kernels`: one an op and shape."""

    environment: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    kernels: list[KernelResult] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        errors = sum(result.error is not None for result in self.results)
        if errors and errors == len(self.results):
            return ExitCode.ERROR
        return ExitCode.PARTIAL if errors else ExitCode.OK

    def to_json(self) -> dict[str, Any]:
        """The object that `bench --json` writes."""
        content = {"environment": self.environment, "results": [result.to_json() for result in self.results]}
        return content | ({"kernels": [kernel.to_json() for kernel in self.kernels]} if self.kernels else {})


class BenchSink(Protocol):
    """Who shows what happens."""

    def note(self, text: str) -> None:
        """Something worth knowing, such as which model it is."""

    def warn(self, text: str) -> None:
        """Something that may not be what the user wants."""

    def loading(self, text: str) -> None:
        """What is being done; "" when it is done."""

    def row(self, result: Result) -> None:
        """A row is done."""

    def kernel(self, result: KernelResult) -> None:
        """An op is done."""

    def peer(self, result: Result) -> None:
        """A peer has done a row's work: the last of `result.peers`."""


def run(options: BenchOptions, sink: BenchSink) -> BenchResult:
    """Measures everything. UserError when it cannot start; a row that fails says why in its result."""
    if options.model is not None and options.shape is not None:
        raise UserError("a model and a shape are given", fix="Use one of them.", exit_code=ExitCode.USAGE)
    sink.loading("loading torch")
    device_name = choose_device(options.device, sink.loading, sink.warn)
    cases = _cases(options, device_name)
    name, model = _model(options, device_name, sink)
    for peer in options.compare:
        check_peer(peer, cases)
    baseline = read_baseline(options.baseline) if options.baseline else None
    session = Session(
        model,
        device_name,
        cases,
        {"dtype": options.dtype, **options.engine},
        seed=options.seed,
        warmup=options.warmup,
        say=sink.loading,
    )
    device = torch_device(device_name)
    result = BenchResult(environment.describe(device))
    result.environment |= {"model": name, "random_weights": isinstance(model, ModelConfig), "dtype": session.dtype}
    result.environment |= _settings(options, session)
    if baseline:
        for difference in differences(result.environment, baseline["environment"]):
            sink.warn(f"the baseline is not of the same kind: {difference}")
    if options.suite:
        for difference in suite.differences(result.environment):
            sink.warn(f"the targets are of something else: {difference}")
    result.environment["clocks_before"] = environment.clocks(device)
    _measure_ceiling(session, result, sink)
    repetitions = options.repetitions or DEFAULTS[device_name]["repetitions"][0]
    began = time.perf_counter()
    if options.kernels or options.stages:
        _measure_kernels(options, session, result, sink)
    else:
        with unwinding():
            _measure_cases(options, session, result, sink)
    result.environment["clocks_after"] = environment.clocks(device)
    result.environment["seconds"] = time.perf_counter() - began
    session.close()
    for peer in options.compare:
        sink.loading(f"the same work by {peer}")
        for row in compare(peer, session, result.results, repetitions):
            sink.peer(row)
    if baseline:
        mark_changes(result.results, baseline)
        if not any(row.baseline for row in result.results):
            sink.warn("the baseline has none of these rows, so there is nothing to compare")
    sink.loading("")
    return result


def _measure_cases(options: BenchOptions, session: Session, result: BenchResult, sink: BenchSink) -> None:
    cases, began = session.cases, time.perf_counter()
    repetitions = result.environment["settings"]["repetitions"]
    for number, case in enumerate(cases, 1):
        sink.loading(f"measuring {number} of {len(cases)}: {case.name or case.test}")
        if options.suite and time.perf_counter() - began > suite.SECONDS:
            row = empty_result(case)
            row.error = f"left out: the suite has run for {suite.SECONDS:.0f} s"
        else:
            budget = float("inf") if options.repetitions else UNASKED_SECONDS
            budget = suite.ROW_SECONDS if options.suite else budget
            row = session.measure(case, repetitions, budget)
            if row.error is not None and session.isolated:
                sink.warn("the device is lost to this process: each further row gets a process of its own")
        if options.suite:
            suite.judge(row)
        result.results.append(row)
        sink.row(row)


def _measure_kernels(options: BenchOptions, session: Session, result: BenchResult, sink: BenchSink) -> None:
    """Ops at the shapes of the tests: one token more than the longest case's prompt and depth is attended to."""
    only_stages = options.stages and not options.kernels
    prefills = sorted({case.prompt_tokens for case in session.cases if case.test == "prefill" and not only_stages})
    decodes = [case for case in session.cases if case.test == "decode"]
    for context in sorted({case.depth + case.prompt_tokens for case in decodes}) or [0]:
        sink.loading(f"timing ops at a context of {context}")
        for kernel in measure_kernels(
            session.config(),
            session.device,
            result.environment["dtype"],
            session.ceiling,
            batches=sorted({case.batch for case in decodes if case.depth + case.prompt_tokens == context}),
            context=context,
            prompts=prefills,
            seed=options.seed,
            only_stages=only_stages,
        ):
            result.kernels.append(kernel)
            sink.kernel(kernel)
        prefills = []
    if only_stages and not result.kernels:
        raise UserError(
            "no decode test runs as the fused step here",
            where="--stages",
            fix="It needs a GPU of compute capability 9 or 10, a 16-bit dtype and at most 8 prompts at once (-b).",
        )


def _cases(options: BenchOptions, device: str) -> list[Case]:
    tests = {"-p": options.prompts, "-n": options.generated, "-d": options.depths}
    given = next((option for option, value in tests.items() if value is not None), None)
    chosen = [name for name, value in (("--suite", options.suite), ("--workload", options.workload)) if value]
    if len(chosen) == 2 or (chosen and given):
        raise UserError(
            f"{chosen[0]} says itself what is run", where=given or chosen[1], fix="Use one of them.",
            exit_code=ExitCode.USAGE,
        )  # fmt: skip
    if options.only and not options.suite:
        raise UserError("names rows of a suite", where="--only", fix="Add --suite targets.", exit_code=ExitCode.USAGE)
    ops = "--kernels" if options.kernels else "--stages" if options.stages else ""
    beside = {"--workload": options.workload, "--compare": options.compare, "--baseline": options.baseline}
    if ops and any(beside.values()):
        other = next(option for option, value in beside.items() if value)
        raise UserError(f"{ops} and {other} are given", fix=f"Use one of them: {ops} runs no tests.",
                        exit_code=ExitCode.USAGE)  # fmt: skip
    if options.rate is not None and not options.workload:
        raise UserError("arrivals need requests", where="--rate", fix="Add --workload nano or another.",
                        exit_code=ExitCode.USAGE)  # fmt: skip
    if options.rate is not None and not 0 < options.rate < 1e9:
        raise UserError(f"{options.rate} is no rate", where="--rate", fix="Give a number above 0.",
                        exit_code=ExitCode.USAGE)  # fmt: skip
    defaults = DEFAULTS[device]
    if options.suite:
        return suite.suite_cases(options.suite, options.only)
    if options.workload:
        workload = with_rate(find_workload(options.workload), options.rate)
        bound = options.engine.get("max_batched_tokens")
        if workload.interference and bound:
            workload = replace(workload, name=f"{workload.name}, {bound} a step")
        limit = options.engine.get("max_num_seqs") or (256 if device == "cuda" else 32)
        return [workload_case(workload, n) for n in options.batches or (limit,)]
    cases = grid(
        defaults["prompts"] if options.prompts is None else options.prompts,
        defaults["generated"] if options.generated is None else options.generated,
        options.batches or defaults["batches"],
        options.depths or defaults["depths"],
    )
    if not cases:
        raise UserError("nothing is left to measure", fix="Give -p or -n above 0.", exit_code=ExitCode.USAGE)
    return cases


def _model(options: BenchOptions, device: str, sink: BenchSink) -> tuple[str, Path | ModelConfig]:
    """The model's name, and a checkpoint folder or the configuration for random weights."""
    if options.model is None and (options.shape is not None or device == "cuda"):
        name, config = find_shape(options.shape or DEFAULT_SHAPE)
        why = "" if options.shape else "; --model DIR or --shape NAME takes another"
        sink.note(f"model: the shape of {name} with random weights{why}")
        return name, config
    resolved = resolve_model(options.model or DEMO)
    sink.note(resolved.note if options.model else f"{resolved.note}; no GPU is used")
    read_config(resolved.path)  # what is wrong with it is said before anything is measured
    return resolved.path.resolve().name, resolved.path


def _settings(options: BenchOptions, session: Session) -> dict[str, Any]:
    arguments = session.arguments()
    return {
        "config": asdict(session.config()),
        "settings": {
            "warmup": options.warmup,
            "seed": options.seed,
            "repetitions": options.repetitions or DEFAULTS[session.device]["repetitions"][0],
            "prefix_cache": arguments["prefix_cache"],
            "fresh_prompts": "random ids, new ones in each run",
            "engine": {key: arguments[key] for key in sorted(arguments)},
        },
    }


def _measure_ceiling(session: Session, result: BenchResult, sink: BenchSink) -> None:
    """Puts the machine's ceiling into session and environment; without it there are no shares."""
    sink.loading("measuring what this machine can do")
    try:
        measured = measure_ceiling(torch_device(session.device), session.dtype)
    except RuntimeError as error:
        sink.warn(f"this machine's ceiling could not be measured, so there are no shares of it: {error}")
        measured = {}
    if measured:
        session.ceiling = Ceiling(measured["read_bytes_per_second"], measured["matmul_flops_per_second"])
    result.environment["ceiling"] = measured or None
