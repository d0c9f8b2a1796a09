"""`tinyvllm generate`: prompts in, records out. Nothing is printed here; a sink is told what happens."""

from __future__ import annotations

import os
import stat
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from tinyvllm_cli.checkpoint.config import read_config
from tinyvllm_cli.checkpoint.faults import quote
from tinyvllm_cli.checkpoint.identity import model_identity
from tinyvllm_cli.commands.interrupt import Interrupts
from tinyvllm_cli.commands.job import Job, Records
from tinyvllm_cli.commands.model import resolve_model
from tinyvllm_cli.engine.sequence import SamplingParams
from tinyvllm_cli.errors import ExitCode, UserError
from tinyvllm_cli.generation import MAX_TOKENS, recommended_sampling, unsupported_sampling
from tinyvllm_cli.jobs.lines import Prompt
from tinyvllm_cli.jobs.output import Done, OutputFile
from tinyvllm_cli.jobs.prompts import Format, PromptSource, from_arguments, from_file, source_stat
from tinyvllm_cli.jobs.results import Model, Record

Order = Literal["input", "finished"]


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What the command line says.

    Attributes:
        prompts: prompts given as arguments; a single "-" means standard input.
        prompts_file: file of prompts, or "-"; excludes `prompts`.
        prompts_format, whole_file: how to read it.
        model: as for `resolve_model`.
        raw: leave the chat template out.
        sampling: the arguments of `SamplingParams` that were given, by name; a prompt's own line goes before them.
        greedy: the most probable token always, and nothing from generation_config.json.
        engine: arguments of `LLM`, by name.
        output: file for the records; None for none.
        order: of the records.
        resume, overwrite: as for `OutputFile`.
    """

    prompts: tuple[str, ...] = ()
    prompts_file: str | None = None
    prompts_format: Format = "auto"
    whole_file: bool = False
    model: str | None = None
    raw: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    greedy: bool = False
    engine: dict[str, Any] = field(default_factory=dict)
    output: Path | None = None
    order: Order = "input"
    resume: bool = False
    overwrite: bool = False


@dataclass(slots=True)
class GenerateResult:
    """What was done; also the state of a job that runs, for its progress.

    Attributes:
        total: prompts in all, None while unknown.
        num_records, num_errors: records there are, and how many of them are errors; those of a resumed file included.
        num_resumed: records that were in the file already.
        prompt_tokens, output_tokens: tokens of the prompts whose answers have begun, tokens generated.
        cached_tokens: prompt tokens that were in the prefix cache.
        num_running, num_waiting: sequences in the engine.
        kv_use: share of the KV cache that is in use.
        load_s, generate_s: seconds until the model was ready, and since.
        device, dtype: what it ran on.
        output: the file of the records.
        interrupted: stopped by Ctrl-C or SIGTERM.
        can_resume: whether the same command goes on with --resume.
    """

    total: int | None = None
    num_records: int = 0
    num_errors: int = 0
    num_resumed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_use: float = 0.0
    load_s: float = 0.0
    generate_s: float = 0.0
    device: str = ""
    dtype: str = ""
    output: str = ""
    interrupted: bool = False
    can_resume: bool = False

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        return ExitCode.PARTIAL if self.num_errors else ExitCode.OK


class GenerateSink(Protocol):
    """Who shows what happens.

    Attributes:
        streams: wants `text` as it comes.
    """

    streams: bool

    def note(self, text: str) -> None:
        """Something worth knowing, such as which model it is."""

    def warn(self, text: str) -> None:
        """Something that may not be what the user wants."""

    def loading(self, text: str) -> None:
        """What is being done to make the model ready."""

    def start(self, source: PromptSource, to_file: bool) -> None:
        """The model is ready; the prompts come from `source`, and the records are written to a file or not."""

    def text(self, prompt: Prompt, text: str) -> None:
        """A piece of an answer."""

    def record(self, prompt: Prompt, record: Record) -> None:
        """A record, in the order asked for."""

    def progress(self, state: GenerateResult) -> None:
        """Called after each step."""

    def finish(self, result: GenerateResult) -> None:
        """All is done, or interrupted."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A job that is ready to be done."""

    folder: Path
    model: Model
    source: PromptSource
    sampling: SamplingParams
    done: Done | None
    records: Records


def run(options: GenerateOptions, sink: GenerateSink) -> GenerateResult:
    """Answers all prompts. UserError when the job cannot start; what is wrong with one prompt becomes its record."""
    began = time.perf_counter()
    _check(options)
    result = GenerateResult(output=str(options.output or ""))
    work = _prepare(options, sink, result)
    try:
        if work.done is not None and work.done.num_records == work.source.total:
            work.records.close()
            sink.finish(result)
        else:
            _answer(work, options, sink, result, began)
    except BaseException:
        with suppress(UserError, BrokenPipeError):
            work.records.close()
        raise
    return result


def _prepare(options: GenerateOptions, sink: GenerateSink, result: GenerateResult) -> _Work:
    """Everything that can be found wrong without the model's weights, and without torch."""
    folder, note = resolve_model(options.model)
    sink.note(note)
    source_name = _input_name(options) or ""
    output = None
    if options.output is not None:
        output = OutputFile(options.output, resume=options.resume, overwrite=options.overwrite, source=source_name)
    source = _open(options, sink)
    sampling = _sampling(options, folder, sink)
    model = Model(folder.resolve().name, model_identity(folder))
    result.total = source.total
    result.can_resume = output is not None and source.digest is not None
    if options.resume and not result.can_resume:
        raise _usage("what comes through a pipe is read only once: it cannot be resumed", "Put it into a file.")
    done = None
    if output is not None:
        job = _identity_of_job(options, source, sampling, model)
        done = output.begin(job, source.total if result.can_resume else None, options.order == "input")
        result.num_records, result.num_errors, result.num_resumed = done.num_records, done.num_errors, done.num_records
    records = Records(sink, result, output, options.order == "input", done)
    return _Work(folder, model, source, sampling, done, records)


def _answer(work: _Work, options: GenerateOptions, sink: GenerateSink, result: GenerateResult, began: float) -> None:
    sink.loading("loading torch")
    from tinyvllm_cli.llm import LLM

    llm = LLM(work.folder, progress=sink.loading, use_chat_template=not options.raw, **options.engine)
    for warning in llm.warnings:
        sink.warn(warning)
    loaded = time.perf_counter()
    result.load_s = loaded - began
    result.device, result.dtype = str(llm.device), str(llm.dtype).removeprefix("torch.")
    sink.start(work.source, options.output is not None)
    job = Job(llm, work.model, work.sampling, options.raw, sink, result, work.records)
    with Interrupts() as interrupts:
        try:
            job.run(work.source, interrupts, work.done.has if work.done else lambda index: False)
        except KeyboardInterrupt:
            result.interrupted = True
        work.records.close()
        result.generate_s = time.perf_counter() - loaded
        sink.finish(result)


def _check(options: GenerateOptions) -> None:
    """Refuses what the command line alone shows to be wrong."""
    if options.prompts and options.prompts_file is not None:
        raise _usage("prompts are given both as arguments and by --prompts")
    if options.greedy and options.sampling.get("temperature"):
        raise _usage("--greedy and a --temperature above 0 exclude each other")
    if options.resume and options.overwrite:
        raise _usage("--resume and --overwrite exclude each other")
    if (options.resume or options.overwrite) and options.output is None:
        raise _usage("--resume and --overwrite are for --output", "Name the file with --output FILE.")
    if options.resume and _input_name(options) == "-":
        raise _usage("standard input is read only once: it cannot be resumed", "Put it into a file.")
    if "-" in options.prompts and len(options.prompts) > 1:
        raise _usage("- reads all prompts from standard input", "Leave the others out, or write ' -' for a minus sign.")
    if options.output == Path("-"):
        raise _usage("--output - is no file", "Without --output, --json writes the records to standard output.")
    if options.whole_file and options.prompts and options.prompts != ("-",):
        raise _usage("--whole-file is for --prompts FILE or standard input", "Leave it out.")
    try:
        SamplingParams(**({"temperature": 0.0 if options.greedy else 1.0} | options.sampling))
    except UserError as error:
        error.exit_code = ExitCode.USAGE
        raise


def _usage(what: str, fix: str = "Use one of them.") -> UserError:
    return UserError(what, fix=fix, exit_code=ExitCode.USAGE)


def _input_name(options: GenerateOptions) -> str | None:
    """The file of prompts, "-" for standard input, None for arguments."""
    return "-" if options.prompts == ("-",) else options.prompts_file


def _sampling(options: GenerateOptions, folder: Path, sink: GenerateSink) -> SamplingParams:
    """The parameters of prompts that say nothing else; tells which of them generation_config.json has set."""
    given = {"temperature": 0.0} | options.sampling if options.greedy else options.sampling
    generation = {} if options.greedy else read_config(folder).generation
    recommended = recommended_sampling(generation)
    for name, value in unsupported_sampling(generation).items():
        sink.warn(f"{name} {quote(value)} in generation_config.json is not supported and is ignored")
    shown = {name: value for name, value in recommended.items() if name not in given}
    if shown:
        values = ", ".join(f"{name} {value:g}" for name, value in shown.items())
        sink.note(f"sampling as generation_config.json recommends: {values} (--greedy: without)")
    try:
        return SamplingParams(**({"max_tokens": MAX_TOKENS} | shown | given))
    except UserError as error:
        error.exit_code = ExitCode.USAGE
        raise


def _open(options: GenerateOptions, sink: GenerateSink) -> PromptSource:
    name = _input_name(options)
    if name is not None:
        if name == "-" and sys.stdin is not None and sys.stdin.isatty():
            sink.note("reading prompts from the keyboard, one a line; Ctrl-D at the beginning of a line ends them")
        if options.output is None and _is_stdout(name):
            shown = "standard input" if name == "-" else name
            raise UserError("is the output, too", where=shown, fix="Redirect to another file.")
        return from_file(name, options.prompts_format, whole=options.whole_file)
    if not options.prompts:
        raise _usage(
            "no prompt given",
            'Give prompts as arguments ("Say hello."), --prompts FILE with one a line, or - for standard input.',
        )
    for text in options.prompts:
        if os.path.isfile(text):
            sink.warn(f"{text} is taken as a prompt; to read the file of this name: --prompts {text}")
    return from_arguments(options.prompts)


def _is_stdout(name: str) -> bool:
    """Whether a file is what standard output is redirected to: it would be read as it grows."""
    read = source_stat(name)
    try:
        return read is not None and stat.S_ISREG(read.st_mode) and os.path.samestat(read, os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError, AttributeError):
        return False


def _identity_of_job(
    options: GenerateOptions, source: PromptSource, sampling: SamplingParams, model: Model
) -> dict[str, Any]:
    """All that decides about the records, see `jobs.output.Job`. The speed's options are not part of it."""
    return {
        "model": model.identity,
        "input": {"sha256 of the input": source.digest, "format": options.prompts_format, "raw": options.raw}
        | {"whole_file": options.whole_file, "order": options.order},
        "sampling": asdict(sampling),
        "engine": {name: options.engine.get(name) for name in ("device", "dtype", "max_model_len")},
    }
