"""From token ids to finished answers with their text: samples, stop strings, log-probabilities, streamed pieces.

The engine knows tokens only; `Requests` is what `generate` and the Python API put around it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tinyvllm_cli.engine.sequence import FinishReason, SamplingParams, TokenEvent
from tinyvllm_cli.errors import UserError
from tinyvllm_cli.text.stop import StopStrings
from tinyvllm_cli.text.stream import IncrementalDecoder

if TYPE_CHECKING:
    from tinyvllm_cli.engine.engine import Engine
    from tinyvllm_cli.engine.sequence import Sequence as EngineSequence
    from tinyvllm_cli.engine.sequence import TokenLogprobs
    from tinyvllm_cli.text.tokenizer import Tokenizer


MAX_TOKENS = 256
"""`max_tokens` where nothing is said about it."""

NOT_DONE = (
    *("num_beams", "num_beam_groups", "no_repeat_ngram_size", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("penalty_alpha", "guidance_scale", "sequence_bias", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens", "stop_strings", "dola_layers"),
    *("exponential_decay_length_penalty", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "top_h"),
    "watermarking_config",
)
"""Settings of transformers that change answers; None, 0, 1 and what is empty turn them off."""


class Logprob(NamedTuple):
    """What is told of a token at one place of an answer.

    Attributes:
        logprob: natural logarithm of its probability, after penalties and before temperature.
        rank: 1 for the most probable token, and so on; None for a chosen one that is not among those asked for.
        decoded_token: its text, with U+FFFD where it holds only a part of a character.
        token_bytes: the bytes that it stands for.
    """

    logprob: float
    rank: int | None
    decoded_token: str
    token_bytes: bytes


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of the prompt's `n` answers.
        text: without special tokens, up to a stop string.
        token_ids: all that were generated, those of the stop string and an end-of-sequence token included.
        finish_reason: "stop" (end of sequence, stop token or stop string), "length" or "abort".
        stop_reason: the stop string or the token of `stop_token_ids` that ended it, else None.
        logprobs: for each token, if asked for: token id to Logprob, the chosen one first, then the most probable.
        cumulative_logprob: sum over the chosen tokens, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answers to one prompt.

    Attributes:
        request_id: as `Requests.add` gave it.
        prompt: its text, None when it was given as messages or ids.
        prompt_token_ids: what the model saw: template, BOS and all.
        outputs: `n` answers, by index.
        num_cached_tokens: tokens of the prompt that were in the prefix cache when its first answer was begun.
        first_token_s, total_s: seconds from submission to the first token, and to the last.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0


class TextPiece(NamedTuple):
    """Some more text of a request that is streamed. All its pieces together are the text of its output."""

    request_id: int
    text: str


@dataclass(slots=True)
class _Sample:
    """One answer in the making; decoder and stops only where its text is needed while it grows."""

    request: _Request
    index: int
    sequence: EngineSequence
    stops: StopStrings
    decoder: IncrementalDecoder | None
    pieces: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Request:
    output: RequestOutput
    params: SamplingParams
    streams: bool
    submitted: float
    first: EngineSequence | None = None
    first_token: float = 0.0


class Requests:
    """Prompts that are being answered by an engine.

    Args:
        engine: nobody else adds to it meanwhile.
        tokenizer: of the model.
        eos_token_ids: tokens without text beside the tokenizer's special ones.

    Attributes:
        prompt_tokens: tokens of the prompts whose answers have begun.
        cached_tokens: those of them that were in the prefix cache.
        output_tokens: tokens generated.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self._engine = engine
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids.union(eos_token_ids)
        self._samples: dict[int, _Sample] = {}  # unfinished ones, by the engine's seq_id
        self._num_requests = 0
        self._num_open = 0

    def __len__(self) -> int:
        """Requests that are not finished."""
        return self._num_open

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._engine.has_work

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        streams: bool = False,
    ) -> int:
        """Queues a prompt and returns its number. UserError, and nothing is queued, when it can never run.

        Args:
            prompt_token_ids: ids of the vocabulary, at least one.
            params: `n` answers are made with seeds of their own and share the prompt's blocks.
            prompt: its text, for the output.
            streams: whether `step` is to give TextPieces; for a single answer only.
        """
        request_id, now = self._num_requests, time.perf_counter()
        output = RequestOutput(request_id, prompt, list(prompt_token_ids), [])
        request = _Request(output, params, streams and params.n == 1, now)
        for index in range(params.n):
            sequence = self._engine.add(output.prompt_token_ids, params.of_sample(index), request.first)
            request.first = request.first or sequence
            needs_text = request.streams or bool(params.stop)
            decoder = IncrementalDecoder(self._tokenizer, self._hidden) if needs_text else None
            self._samples[sequence.seq_id] = _Sample(request, index, sequence, StopStrings(params.stop), decoder)
        self._num_requests += 1
        self._num_open += 1
        return request_id

    def step(self) -> list[TextPiece | RequestOutput]:
        """Runs the engine one step on; returns new pieces of streamed requests, and the requests that are finished.

        Raises LogitsError as the engine does: see `request_of` and `abort`.
        """
        told: list[TextPiece | RequestOutput] = []
        for event in self._engine.step():
            sample = self._samples.get(event.seq_id)
            if sample is None:
                continue  # a stop string ended it in this very step, and the engine had a reason of its own
            if isinstance(event, TokenEvent):
                self._token(sample, event.token_id, told)
            else:
                self._finish(sample, event.reason, told)
        return told

    def finish_all(self) -> list[RequestOutput]:
        """Runs until nothing is left to do; the outputs by request_id.

        Ctrl-C is obeyed between two steps: within one it could leave the engine in disorder.
        """
        outputs: list[RequestOutput] = []
        with _interrupts_held() as obey:
            while self.has_work:
                outputs += [event for event in self.step() if isinstance(event, RequestOutput)]
                obey()
        return sorted(outputs, key=lambda output: output.request_id)

    def request_of(self, seq_id: int) -> int:
        """The request that an unfinished sequence of the engine belongs to."""
        return self._samples[seq_id].request.output.request_id

    def abort(self) -> None:
        """Takes back all that is not finished, and waits for what the engine has launched."""
        for seq_id in self._samples:
            self._engine.abort(seq_id)
        self._samples.clear()
        self._num_open = 0
        while self._engine.has_work:
            self._engine.step()

    def _token(self, sample: _Sample, token_id: int, told: list[TextPiece | RequestOutput]) -> None:
        self.output_tokens += 1
        if not sample.request.first_token:
            self._begin(sample.request)
        if sample.decoder is None:
            return
        self._show(sample, sample.stops.push(sample.decoder.push(token_id)), told)
        if sample.stops.found is not None:
            self._engine.finish(sample.sequence.seq_id)
            self._finish(sample, "stop", told)

    def _begin(self, request: _Request) -> None:
        request.first_token = time.perf_counter()
        self.prompt_tokens += len(request.output.prompt_token_ids)
        assert request.first is not None
        request.output.num_cached_tokens = request.first.num_cached or 0
        self.cached_tokens += request.output.num_cached_tokens

    def _show(self, sample: _Sample, text: str, told: list[TextPiece | RequestOutput]) -> None:
        if text:
            sample.pieces.append(text)
            if sample.request.streams:
                told.append(TextPiece(sample.request.output.request_id, text))

    def _finish(self, sample: _Sample, reason: FinishReason, told: list[TextPiece | RequestOutput]) -> None:
        del self._samples[sample.sequence.seq_id]
        request, token_ids = sample.request, sample.sequence.output_token_ids
        if not request.first_token:
            self._begin(request)
        stop_reason: str | int | None = sample.stops.found
        shown = token_ids
        if reason == "stop" and stop_reason is None:
            shown = token_ids[:-1]
            self.output_tokens += 1  # the token that stopped it had no event
            stop_reason = token_ids[-1] if token_ids[-1] in request.params.stop_token_ids else None
        if sample.decoder is not None:
            self._show(sample, sample.stops.push(sample.decoder.flush()) + sample.stops.flush(), told)
            text = "".join(sample.pieces)
        else:
            text = self._tokenizer.decode(shown, self._hidden)
        output = CompletionOutput(sample.index, text, token_ids, reason, stop_reason)
        if request.params.logprobs is not None:
            output.logprobs = [self._named(told_of) for told_of in sample.sequence.output_logprobs]
            output.cumulative_logprob = sum(told_of.values[0] for told_of in sample.sequence.output_logprobs)
        request.output.outputs.append(output)
        if len(request.output.outputs) == request.params.n:
            request.output.outputs.sort(key=lambda o: o.index)
            request.output.first_token_s = request.first_token - request.submitted
            request.output.total_s = time.perf_counter() - request.submitted
            self._num_open -= 1
            told.append(request.output)

    def _named(self, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        ranks = {token_id: rank for rank, token_id in enumerate(logprobs.token_ids[1:], 1)}
        named: dict[int, Logprob] = {}
        for token_id, value in zip(logprobs.token_ids, logprobs.values, strict=True):
            data = self._tokenizer.token_bytes(token_id)
            named[token_id] = Logprob(value, ranks.get(token_id), data.decode("utf-8", errors="replace"), data)
        return named


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """While entered, Ctrl-C waits for the next call of the function that is given, in the main thread."""
    pending: list[int] = []

    def obey() -> None:
        if pending:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield obey
        return
    previous = signal.signal(signal.SIGINT, lambda signum, frame: pending.append(signum))
    try:
        yield obey
    finally:
        signal.signal(signal.SIGINT, previous)


def recommended_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config.json recommends, by the names of SamplingParams; only what differs from the defaults.

    `do_sample` false, or missing where no temperature is given, means greedy. UserError for values out of range.
    """
    names = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"]
    found = {name: generation[name] for name in names if generation.get(name) is not None}
    sampled = generation.get("do_sample")
    if sampled or (sampled is None and "temperature" in found):
        found.setdefault("temperature", 1.0)
    else:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
    if found.get("top_k") == -1:
        found["top_k"] = 0
    plain = SamplingParams()
    try:
        SamplingParams(**found)
    except (UserError, TypeError) as error:
        what = error.what if isinstance(error, UserError) else f"a value is of the wrong kind ({error})"
        raise UserError(what, where="generation_config.json", fix="Mend the file, or use --greedy.") from error
    return {name: value for name, value in found.items() if value != getattr(plain, name)}


def unsupported_sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config.json asks for that changes answers and that is not done here."""
    return {name: value for name in NOT_DONE if (value := generation.get(name)) not in (None, 0, 1, [], {})}
