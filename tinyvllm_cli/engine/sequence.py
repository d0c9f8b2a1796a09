"""What is asked of the engine (SamplingParams), what it is working on (Sequence), and what it tells (events)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import index
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tinyvllm_cli.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tinyvllm_cli.engine.prefix_cache import Chain
    from tinyvllm_cli.engine.step_plan import StepLogprobs

FinishReason = Literal["stop", "length", "abort"]
"""stop: an end-of-sequence or stop token, or a stop string; length: max_tokens or max_model_len; abort: taken back."""

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
"""Most alternatives that a sequence can be told beside each of its tokens."""
MAX_SAMPLES = 256
"""Most answers to one prompt."""
MAX_TEMPERATURE = 1e30
MAX_REPETITION_PENALTY = 1e6
"""Beyond these, and the penalty below 1 / 1e6, fp32 makes infinities of logits."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one sequence are chosen. Values out of range raise UserError.

    Logits are changed by the penalties first, then divided by the temperature; then come top-k, min-p and top-p.

    Attributes:
        n: answers to each prompt, 1 to 256; answer k draws with `seed + k`. Needs a temperature above 0 unless 1.
        max_tokens: at most so many new tokens, at least 1; max_model_len may end the sequence earlier.
        temperature: 0 takes the most probable token (greedy); above, to 1e30, logits are divided by it.
        top_k: only the k most probable tokens; 0 keeps all.
        top_p: only the smallest set of tokens that reaches this probability, 0 < top_p <= 1.
        min_p: only tokens with at least this share of the largest probability, 0 <= min_p <= 1.
        repetition_penalty: above 1 makes tokens of the prompt and of the answer less probable (their logits are divided
            by it where positive, else multiplied); 1 is off, 1e-6 to 1e6.
        presence_penalty: subtracted from the logits of tokens that the answer has, -2 to 2.
        frequency_penalty: the same for each time that the answer has the token, -2 to 2.
        seed: with a token's position it decides the token's random draw, whatever runs beside it; 0 to 2^63 - 1.
        ignore_eos: end-of-sequence tokens of the model do not stop the sequence; `stop_token_ids` still do.
        stop_token_ids: further tokens that stop the sequence.
        stop: texts that stop the answer, which ends before them; a single one may be given as it is. The engine knows
            no text and leaves them, as `n`, to the layer above (`tinyvllm_cli.generation`).
        logprobs: how many of the most probable tokens are told beside each token, with their log-probabilities, 0 to
            20; None tells none. Of the distribution after penalties, before temperature and what follows.
    """

    n: int = 1
    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: Collection[int] = ()
    stop: Collection[str] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("n", "max_tokens", "top_k", "seed", *(() if self.logprobs is None else ("logprobs",))):
            object.__setattr__(self, name, _integer(name, getattr(self, name)))
        _require(1 <= self.n <= MAX_SAMPLES, "n", self.n, f"from 1 to {MAX_SAMPLES}")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(
            0 <= self.temperature <= MAX_TEMPERATURE,
            "temperature",
            self.temperature,
            f"0 (greedy) or a positive number up to {MAX_TEMPERATURE:g}",
        )
        _require(self.n == 1 or self.temperature > 0, "n", self.n, "1 at temperature 0, where all answers are equal")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (all tokens) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        _require(
            1 / MAX_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
            "repetition_penalty",
            self.repetition_penalty,
            f"above 0 (1 is off), from {1 / MAX_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "from -2 to 2 (0 is off)")
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"from 0 to {MAX_SEED}")
        _require(min(self.stop_token_ids, default=0) >= 0, "stop_token_ids", self.stop_token_ids, "0 or more each")
        _require(
            all(map(_is_text, self.stop)), "stop", list(self.stop), "texts that are not empty, of whole characters"
        )
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            self.logprobs,
            f"from 0 to {MAX_LOGPROBS}",
        )

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far by more than the model."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def of_sample(self, index: int) -> SamplingParams:
        """The parameters of answer `index` of `n`: those of a prompt of its own with another seed."""
        return replace(self, n=1, seed=(self.seed + index) % (MAX_SEED + 1))


def _is_text(text: str) -> bool:
    return bool(text) and not any("\ud800" <= char <= "\udfff" for char in text)


def _integer(name: str, value: Any) -> int:
    """A plain int, also of numpy's; 1.5 would be cut somewhere."""
    try:
        return index(value)
    except TypeError:
        raise UserError(f"{name} is {value!r}", fix=f"{name} must be an integer.") from None


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value}", fix=f"{name} must be {allowed}.")


class TokenLogprobs(NamedTuple):
    """Tokens and their log-probabilities at one place of an answer: first the token chosen, then the most probable."""

    token_ids: list[int]
    values: list[float]


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """It has no row and no blocks: not yet admitted, or preempted."""
    RUNNING = "running"
    """It was admitted. Once its last step is launched it has no row any more, and only its tokens are awaited."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and what was generated from it. Only the scheduler changes it.

    Attributes:
        seq_id: unique in its engine, in order of arrival.
        prompt_token_ids: as given, at least one.
        params: how its tokens are chosen.
        stop_ids: tokens that finish it; such a token is the last of `output_token_ids`.
        max_outputs: how many tokens it may generate, from max_tokens and max_model_len.
        output_token_ids: the tokens that the host has seen.
        status: see `Status`.
        finish_reason: None until it is finished.
        row: its row in the runner, -1 when it has none.
        prefix: from when its admission is considered until its prefill is planned to the end, all its tokens, int32
            [prompt + outputs]; else None.
        num_launched: output tokens that the device was asked for, seen or not; set when the row is given up.
        chain: its place in the prefix cache; None when it shares nothing.
        num_cached: tokens of its prompt that were found in the prefix cache at its first admission; before that None.
        output_logprobs: for each of `output_token_ids`, if `params.logprobs` asks for it.
    """

    seq_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_outputs: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    row: int = -1
    prefix: npt.NDArray[np.int32] | None = None
    num_launched: int = 0
    chain: Chain | None = None
    num_cached: int | None = None
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host: the prompt and the outputs seen."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def keep_logprobs(self, told: StepLogprobs, i: int) -> None:
        """Takes what it asked for of row `i`, unless it has finished."""
        if self.params.logprobs is not None and self.finish_reason is None:
            ids = told.token_ids[i, : self.params.logprobs + 1].tolist()
            values = told.values[i, : self.params.logprobs + 1].tolist()
            count = ids.index(-1) if -1 in ids else len(ids)  # a vocabulary may have fewer tokens
            self.output_logprobs.append(TokenLogprobs(ids[:count], values[:count]))


class TokenEvent(NamedTuple):
    """A new token of the answer. A token that stops its sequence has no TokenEvent: its text is not shown."""

    seq_id: int
    token_id: int


class FinishEvent(NamedTuple):
    """A sequence has finished; it comes after the last TokenEvent of that sequence."""

    seq_id: int
    reason: FinishReason
    sequence: Sequence


Event = TokenEvent | FinishEvent


class LogitsError(UserError):
    """There is no next token for a sequence: among its logits is NaN, or the largest of them is not finite."""

    def __init__(self, seq_id: int) -> None:
        super().__init__(
            "the model computes no numbers (NaN or infinite) as logits",
            fix="See whether its weights are whole: tinyvllm inspect DIR --check-data. "
            "If they are, use --dtype bfloat16, or --device cpu --dtype float32.",
        )
        self.seq_id = seq_id
