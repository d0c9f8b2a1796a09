"""The loop of `tinyvllm generate`: keeps the engine fed and turns what it finishes into records."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tinyvllm_cli.engine.sequence import LogitsError, SamplingParams
from tinyvllm_cli.errors import UserError
from tinyvllm_cli.generation import RequestOutput, Requests, TextPiece
from tinyvllm_cli.jobs.lines import Prompt
from tinyvllm_cli.jobs.prompts import PromptSource
from tinyvllm_cli.jobs.results import InOrder, Model, Record, error_record, is_error, success_record
from tinyvllm_cli.text.encode import check_ids, encode_chat, encode_text

if TYPE_CHECKING:
    from tinyvllm_cli.commands.generate import GenerateResult, GenerateSink
    from tinyvllm_cli.commands.interrupt import Interrupts
    from tinyvllm_cli.jobs.output import Done, OutputFile
    from tinyvllm_cli.llm import LLM

EARLY_PER_ROW = 8
"""Finished records that may wait for an older prompt's, for each prompt that can run at once."""


class Records:
    """Where records go: to the file, if there is one, and to the sink, in the order that was asked for.

    Args:
        sink: told of each record, and keeps the counts of `result`.
        output: the file, open.
        in_order: in the order of the input; else as they come.
        done: what is in the file already.
    """

    def __init__(
        self, sink: GenerateSink, result: GenerateResult, output: OutputFile | None, in_order: bool, done: Done | None
    ) -> None:
        self._sink = sink
        self._result = result
        self._output = output
        self._ordered: InOrder | None = None
        if in_order:
            self._ordered = InOrder(lambda item: self._emit(*item), done.first if done else 0)
            for index, record in done.early.items() if done else ():
                self._ordered.add(index, (None, record))

    @property
    def num_early(self) -> int:
        """Records that wait for older ones."""
        return self._ordered.num_early if self._ordered else 0

    def add(self, prompt: Prompt, record: Record) -> None:
        """Takes the record of a prompt, once."""
        if self._ordered:
            self._ordered.add(prompt.index, (prompt, record))
        else:
            self._emit(prompt, record)

    def close(self) -> None:
        """Writes what still waits, after an interruption; then sees to it that all is on the disk."""
        if self._ordered:
            self._ordered.close()
        if self._output:
            self._output.close()

    def _emit(self, prompt: Prompt | None, record: Record) -> None:
        if self._output:
            self._output.write(record)
        if prompt is not None:  # else it was counted when the file was read
            self._result.num_records += 1
            self._result.num_errors += is_error(record)
            self._sink.record(prompt, record)


class Job:
    """Answers all prompts of a source.

    A prompt is read only when there is room for it, and few records wait for others, so that a file of any length needs
    little memory.
    """

    def __init__(
        self,
        llm: LLM,
        model: Model,
        sampling: SamplingParams,
        raw: bool,
        sink: GenerateSink,
        result: GenerateResult,
        records: Records,
    ) -> None:
        self._llm = llm
        self._model = model
        self._sampling = sampling
        self._raw = raw
        self._sink = sink
        self._result = result
        self._records = records
        self._requests = Requests(llm.engine, llm.tokenizer, llm.config.eos_token_ids)
        self._prompts: dict[int, Prompt] = {}  # by the number of their request
        self._window = 2 * llm.limits.max_num_seqs
        self._most_early = EARLY_PER_ROW * llm.limits.max_num_seqs
        self._warned_keys: set[str] = set()

    def run(self, source: PromptSource, interrupts: Interrupts, is_done: Callable[[int], bool]) -> None:
        """Until all prompts have their records; KeyboardInterrupt passes through, between two records only."""
        began = time.perf_counter()
        prompts, exhausted = iter(source), False
        while True:
            while not exhausted and self._has_room():
                with interrupts.allowed():
                    prompt = next(prompts, None)
                if prompt is None:
                    exhausted = True
                elif not is_done(prompt.index):
                    self._submit(prompt)
            if not self._requests.has_work:
                if exhausted:
                    return
                continue
            for event in self._step(interrupts):
                if isinstance(event, TextPiece):
                    self._sink.text(self._prompts[event.request_id], event.text)
                else:
                    prompt = self._prompts.pop(event.request_id)
                    self._records.add(prompt, success_record(prompt, event, self._model))
            self._report(time.perf_counter() - began)

    def _has_room(self) -> bool:
        """Whether to read a prompt: always when none is being answered: resumed records may wait for it."""
        few_early = self._records.num_early < self._most_early
        return not self._prompts or (few_early and len(self._prompts) < self._window)

    def _step(self, interrupts: Interrupts) -> list[TextPiece | RequestOutput]:
        try:
            with interrupts.allowed():
                return self._requests.step()
        except LogitsError as error:
            error.where = self._prompts[self._requests.request_of(error.seq_id)].place
            self._requests.abort()  # nothing is on its way any more
            raise

    def _report(self, seconds: float) -> None:
        result, scheduler = self._result, self._llm.engine.scheduler
        result.generate_s = seconds
        result.prompt_tokens, result.output_tokens = self._requests.prompt_tokens, self._requests.output_tokens
        result.cached_tokens = self._requests.cached_tokens
        result.num_running, result.num_waiting = scheduler.num_running, scheduler.num_waiting
        result.kv_use = scheduler.pool.num_used / scheduler.pool.num_blocks
        self._sink.progress(result)

    def _submit(self, prompt: Prompt) -> None:
        for key in prompt.unknown_keys:
            if key not in self._warned_keys:
                self._warned_keys.add(key)
                self._sink.warn(f"line {prompt.line}: the key {key!r} means nothing here and is ignored")
        try:
            if prompt.error:
                raise UserError(prompt.error)
            params = replace(self._sampling, **prompt.parameters)
            request_id = self._requests.add(self._encode(prompt), params, streams=self._sink.streams)
        except UserError as error:
            self._records.add(prompt, error_record(prompt, str(error).replace("\n", ". ")))
            return
        self._prompts[request_id] = prompt

    def _encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: through the chat template if there is one and it is wanted."""
        tokenizer, template = self._llm.tokenizer, self._llm.chat_template
        raw = self._raw or template is None or prompt.api == "completion"
        if prompt.token_ids is not None:
            ids = list(prompt.token_ids)
        elif raw and prompt.text is not None:
            ids = encode_text(tokenizer, prompt.text)
        elif raw or template is None:
            reason = "--raw leaves the chat template out" if self._raw else "the model has no chat template"
            raise UserError(f"messages cannot be used: {reason}", fix="Give a prompt instead.")
        else:
            ids = encode_chat(tokenizer, template, prompt.messages or [{"role": "user", "content": prompt.text}])
        return check_ids(ids, self._llm.config.vocab_size)
