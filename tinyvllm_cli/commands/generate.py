"""`tinyvllm generate`: prompts in, records out. Nothing is printed here; a sink is told what happens."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tinyvllm_cli.commands.interrupt import Interrupts
from tinyvllm_cli.commands.model import resolve_model
from tinyvllm_cli.engine.sequence import FinishEvent, SamplingParams, Sequence, TokenEvent
from tinyvllm_cli.errors import ExitCode, UserError
from tinyvllm_cli.jobs.prompts import Format, Prompt, PromptSource, from_arguments, from_file
from tinyvllm_cli.jobs.results import InOrder, Record, error_record, success_record

if TYPE_CHECKING:
    from tinyvllm_cli.llm import LLM
    from tinyvllm_cli.text.stream import IncrementalDecoder


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What the command line says.

    Attributes:
        prompts: prompts given as arguments; a single "-" means standard input.
        prompts_file: file of prompts, or "-"; excludes `prompts`.
        prompts_format: how to read it.
        model: as for `resolve_model`.
        raw: leave the chat template out.
        sampling: arguments of `SamplingParams`, by name, for every prompt whose line sets nothing else.
        engine: arguments of `LLM`, by name.
    """

    prompts: tuple[str, ...] = ()
    prompts_file: str | None = None
    prompts_format: Format = "auto"
    model: str | None = None
    raw: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class GenerateResult:
    """What was done; also the state of a job that runs, for its progress.

    Attributes:
        total: prompts in all, None while unknown.
        num_records, num_errors: records made so far, and how many of them are errors.
        prompt_tokens, output_tokens: tokens of the prompts accepted, tokens generated.
        load_s, generate_s: seconds until the model was ready, and since.
        device, dtype: what it ran on.
        interrupted: stopped by Ctrl-C or SIGTERM.
    """

    total: int | None = None
    num_records: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    load_s: float = 0.0
    generate_s: float = 0.0
    device: str = ""
    dtype: str = ""
    interrupted: bool = False

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

    def start(self, source: PromptSource) -> None:
        """Generation begins."""

    def text(self, prompt: Prompt, text: str) -> None:
        """Further text of a prompt's answer, if `streams`; several prompts may take turns."""

    def record(self, prompt: Prompt, record: Record) -> None:
        """A prompt is done. Called in the order of the input."""

    def progress(self, state: GenerateResult) -> None:
        """Called after each step."""

    def finish(self, result: GenerateResult) -> None:
        """All is done, or interrupted."""


def run(options: GenerateOptions, sink: GenerateSink) -> GenerateResult:
    """Answers all prompts. UserError when the job cannot start; what is wrong with one prompt becomes its record."""
    began = time.perf_counter()
    try:
        sampling = SamplingParams(**options.sampling)
    except UserError as error:
        error.exit_code = ExitCode.USAGE
        raise
    model = resolve_model(options.model)
    sink.note(model.note)
    source = _open(options, sink)
    sink.loading("loading torch")
    from tinyvllm_cli.llm import LLM

    llm = LLM(model.path, progress=sink.loading, **options.engine)
    for warning in llm.warnings:
        sink.warn(warning)
    loaded = time.perf_counter()
    result = GenerateResult(
        total=source.total, load_s=loaded - began, device=str(llm.device), dtype=str(llm.dtype).removeprefix("torch.")
    )
    sink.start(source)
    job = _Job(llm, sampling, options.raw, sink, result)
    with Interrupts() as interrupts:
        try:
            job.run(source, interrupts)
        except KeyboardInterrupt:
            result.interrupted = True
        job.records.close()
        result.generate_s = time.perf_counter() - loaded
        sink.finish(result)
    return result


def _open(options: GenerateOptions, sink: GenerateSink) -> PromptSource:
    if options.prompts and options.prompts_file is not None:
        raise UserError(
            "prompts are given both as arguments and by --prompts", fix="Use one of them.", exit_code=ExitCode.USAGE
        )
    name = "-" if options.prompts == ("-",) else options.prompts_file
    if name is not None:
        if name == "-" and sys.stdin is not None and sys.stdin.isatty():
            sink.note("reading prompts from the keyboard, one a line; Ctrl-D at the beginning of a line ends them")
        return from_file(name, options.prompts_format)
    if not options.prompts:
        raise UserError(
            "no prompt given",
            fix='Give prompts as arguments ("Say hello."), --prompts FILE with one a line, or - for standard input.',
            exit_code=ExitCode.USAGE,
        )
    for text in options.prompts:
        if len(text) < 256 and "\n" not in text and Path(text).is_file():
            sink.warn(f"{text} is taken as a prompt; to read the file of this name: --prompts {text}")
    return from_arguments(options.prompts)


@dataclass(slots=True)
class _Running:
    """A prompt in the engine."""

    prompt: Prompt
    submitted: float
    decoder: IncrementalDecoder | None
    first_token: float = 0.0


class _Job:
    """Keeps the engine fed, turns its events into records.

    A prompt is read only when there is room for it, so that a file of any length needs little memory.
    """

    def __init__(
        self, llm: LLM, sampling: SamplingParams, raw: bool, sink: GenerateSink, result: GenerateResult
    ) -> None:
        self._llm = llm
        self._sampling = sampling
        self._raw = raw
        self._sink = sink
        self._result = result
        self._running: dict[int, _Running] = {}
        self._window = 2 * llm.limits.max_num_seqs
        self._hidden = frozenset(llm.config.eos_token_ids) | llm.tokenizer.special_ids
        self._warned_keys: set[str] = set()
        self.records = InOrder(self._emit)

    def run(self, source: PromptSource, interrupts: Interrupts) -> None:
        """Until all prompts have their records; KeyboardInterrupt passes through, between two records only."""
        began = time.perf_counter()
        engine, prompts, exhausted = self._llm.engine, iter(source), False
        while True:
            while not exhausted and len(self._running) < self._window:
                with interrupts.allowed():
                    prompt = next(prompts, None)
                if prompt is None:
                    exhausted = True
                else:
                    self._submit(prompt)
            if not engine.has_work:
                if exhausted:
                    return
                continue
            with interrupts.allowed():
                events = engine.step()
            for event in events:
                if isinstance(event, TokenEvent):
                    self._token(event)
                else:
                    self._finished(event)
            self._result.generate_s = time.perf_counter() - began
            self._sink.progress(self._result)

    def _submit(self, prompt: Prompt) -> None:
        for key in prompt.unknown_keys:
            if key not in self._warned_keys:
                self._warned_keys.add(key)
                self._sink.warn(f"line {prompt.line}: the key {key!r} means nothing here and is ignored")
        try:
            if prompt.error:
                raise UserError(prompt.error)
            params = replace(self._sampling, **prompt.parameters)
            token_ids = self._encode(prompt)
            sequence = self._llm.engine.add(token_ids, params)
        except UserError as error:
            message = str(error).replace("\n", " ")
            self.records.add(prompt, error_record(prompt, message))
            return
        decoder = None
        if self._sink.streams:
            from tinyvllm_cli.text.stream import IncrementalDecoder

            decoder = IncrementalDecoder(self._llm.tokenizer, self._hidden)
        self._running[sequence.seq_id] = _Running(prompt, time.perf_counter(), decoder)
        self._result.prompt_tokens += len(token_ids)

    def _encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: through the chat template if there is one and it is wanted."""
        tokenizer, template = self._llm.tokenizer, None if self._raw else self._llm.chat_template
        if prompt.token_ids is not None:
            ids = list(prompt.token_ids)
        elif template is not None:
            messages = prompt.messages or [{"role": "user", "content": prompt.text}]
            ids = tokenizer.encode(template.render(messages), add_special_tokens=False)
        elif prompt.text is not None:
            ids = tokenizer.encode(prompt.text, add_special_tokens=True)
        else:
            reason = "--raw leaves the chat template out" if self._raw else "the model has no chat template"
            raise UserError(f"messages cannot be used: {reason}", fix="Give a prompt instead.")
        if not ids:
            raise UserError("the prompt is empty: it has no token")
        vocab_size = self._llm.config.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise UserError(f"token id {wrong} is outside of the model's vocabulary of {vocab_size}")
        return ids

    def _token(self, event: TokenEvent) -> None:
        running = self._running[event.seq_id]
        self._result.output_tokens += 1
        if not running.first_token:
            running.first_token = time.perf_counter()
        if running.decoder is not None:
            text = running.decoder.push(event.token_id)
            if text:
                self._sink.text(running.prompt, text)

    def _finished(self, event: FinishEvent) -> None:
        running = self._running.pop(event.seq_id)
        sequence: Sequence = event.sequence
        now = time.perf_counter()
        shown = sequence.output_token_ids
        if event.reason == "stop" and shown and shown[-1] in sequence.stop_ids:
            shown = shown[:-1]
            self._result.output_tokens += 1
        if running.decoder is not None:
            rest = running.decoder.flush()
            if rest:
                self._sink.text(running.prompt, rest)
        record = success_record(
            running.prompt,
            prompt_token_ids=sequence.prompt_token_ids,
            text=self._llm.tokenizer.decode(shown, self._hidden),
            token_ids=sequence.output_token_ids,
            finish_reason=event.reason,
            first_token_s=(running.first_token or now) - running.submitted,
            total_s=now - running.submitted,
        )
        self.records.add(running.prompt, record)

    def _emit(self, prompt: Prompt, record: Record) -> None:
        self._result.num_records += 1
        self._result.num_errors += "error" in record
        self._sink.record(prompt, record)
