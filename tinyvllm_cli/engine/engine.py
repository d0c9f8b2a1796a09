"""Engine: feeds the runner with steps and hands out what they bring."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tinyvllm_cli.engine.sequence import Event, FinishReason, SamplingParams, Sequence

if TYPE_CHECKING:
    from tinyvllm_cli.engine.blocks import Int32Array
    from tinyvllm_cli.engine.scheduler import Scheduler
    from tinyvllm_cli.engine.step_plan import StepLogprobs, StepPlan


class Runner(Protocol):
    """What computes the steps, in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> None:
        """Starts a step; does not wait for it."""

    def collect(self) -> Int32Array:
        """Waits for the oldest step launched and not yet collected; its tokens, int32 [R], as in `sample_seqs`.

        A token is -1 where the logits are not numbers.
        """

    def logprobs(self) -> StepLogprobs:
        """Of the step last collected, if its plan asked for them."""


@dataclass(slots=True)
class Statistics:
    """Counts since the engine was made.

    Attributes:
        steps: steps launched.
        preemptions: times that a running sequence had to give up its blocks.
        prompt_tokens: tokens of the prompts accepted.
        cached_tokens: those of them that were found in the prefix cache when their sequences were first admitted.
        output_tokens: tokens generated for sequences that still wanted them.
        computed_tokens: tokens run through the model, recomputed and discarded ones included.
        max_running: most sequences in one step.
    """

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    max_running: int = 0


class Engine:
    """Generates from token ids to token ids.

    Args:
        scheduler, runner: sized for the same limits.
        run_ahead: how many steps are launched beyond the one whose tokens are waited for. Results do not depend on it.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, run_ahead: int = 0, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.run_ahead = run_ahead
        self.statistics = Statistics()
        self._eos = frozenset(eos_token_ids)
        self._unfinished: dict[int, Sequence] = {}
        self._next_id = 0
        self._in_flight: deque[StepPlan] = deque()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: unfinished sequences, or launched steps to be collected."""
        return bool(self._unfinished or self._in_flight)

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def add(
        self, prompt_token_ids: Iterable[int], params: SamplingParams, relative: Sequence | None = None
    ) -> Sequence:
        """Queues a prompt. Raises UserError, and queues nothing, when it can never run within the limits.

        Args:
            prompt_token_ids: ids, at least one.
            params: how the answer's tokens are chosen; of an engine's sequence `n` and `stop` mean nothing.
            relative: a sequence of the very same prompt, added before and not run yet: they share its blocks even
                without a prefix cache.
        """
        stop_ids = frozenset(params.stop_token_ids) if params.ignore_eos else self._eos.union(params.stop_token_ids)
        sequence = Sequence(self._next_id, list(prompt_token_ids), params, stop_ids)
        if relative is not None:
            if relative.prompt_token_ids != sequence.prompt_token_ids:
                raise RuntimeError("only sequences of the same prompt can share its blocks")
            sequence.prompt_token_ids = relative.prompt_token_ids
        self.scheduler.add(sequence, relative)
        self._next_id += 1
        self._unfinished[sequence.seq_id] = sequence
        self.statistics.prompt_tokens += len(sequence.prompt_token_ids)
        return sequence

    def step(self) -> list[Event]:
        """Launches the next step, if any; then waits for the oldest one if more than `run_ahead` are on their way.

        Returns the events of the step that was waited for: its tokens, then who finished. Call it while `has_work`.
        Raises LogitsError for a sequence that has no next token; abort all that are unfinished then.
        """
        plan = self.scheduler.schedule()
        if plan is not None:
            self.runner.launch(plan)
            self._in_flight.append(plan)
            self.statistics.steps += 1
            self.statistics.preemptions = self.scheduler.num_preemptions
            self.statistics.cached_tokens = self.scheduler.num_cached_tokens
            self.statistics.computed_tokens += plan.num_tokens
            self.statistics.max_running = max(self.statistics.max_running, plan.num_seqs)
            if len(self._in_flight) <= self.run_ahead:
                return []
        elif not self._in_flight:
            if self._unfinished:
                raise RuntimeError("no sequence can run, and none is on its way")
            return []
        plan = self._in_flight.popleft()
        sampled = self.runner.collect()
        logprobs = self.runner.logprobs() if plan.wants_logprobs else None
        tokens, finished = self.scheduler.update(plan, sampled, logprobs)
        for event in finished:
            self.statistics.output_tokens += len(event.sequence.output_token_ids)
            del self._unfinished[event.seq_id]
        return [*tokens, *finished]

    def finish(self, seq_id: int, reason: FinishReason = "stop") -> Sequence | None:
        """Ends a sequence for a reason that the caller found, such as a stop string; no FinishEvent is made.

        Events that earlier steps returned for it stand; none will follow. Returns None when it had already finished.
        """
        sequence = self._unfinished.pop(seq_id, None)
        if sequence is not None:
            self.scheduler.finish(sequence, reason)
            self.statistics.output_tokens += len(sequence.output_token_ids)
        return sequence

    def abort(self, seq_id: int) -> Sequence | None:
        """Takes a sequence back; as `finish` with reason "abort"."""
        return self.finish(seq_id, "abort")
