"""Scheduler: decides which sequences run which tokens in the next step, and in which cache blocks.

It plans ahead: `schedule` may be called again before the tokens of earlier plans are known, since a decode takes its
token on the device. A sequence is in one of these places:

    waiting    no row, no blocks; in order of arrival, preempted sequences included
    running    a row, and blocks for all its launched tokens; first it is prefilled (in chunks), then it decodes
    retired    its last step (by max_tokens or max_model_len) is launched; no row, no blocks, only tokens are awaited
    finished   it may still be part of launched steps, whose tokens for it are discarded

Running sequences always arrived before waiting ones. The oldest is never preempted for a younger one, and `add` refuses
what could not run alone: so every step brings the oldest forward, and everything ends.

Sequences that begin alike share the blocks that their common beginning fills (see `prefix_cache`). Full blocks of a
prefill can be found as soon as the step that fills them is planned, even in that step; and nobody is admitted before
the step has tokens for all that running prefills still need. So of prompts that are submitted together, the first one
computes what they have in common. Blocks of generated tokens can be found once their sequence has left its row.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tinyvllm_cli.engine.blocks import BlockPool, Int32Array
from tinyvllm_cli.engine.prefix_cache import Beginning, PrefixCache
from tinyvllm_cli.engine.refusal import allowed_outputs
from tinyvllm_cli.engine.sequence import FinishEvent, FinishReason, LogitsError, Sequence, Status, TokenEvent
from tinyvllm_cli.engine.step_plan import FROM_DEVICE, History, StepLogprobs, StepPlan

if TYPE_CHECKING:
    from tinyvllm_cli.memory.plan import Limits


class _Launched(NamedTuple):
    """A plan whose tokens are not known yet: who gets them, and whom they bring to max_outputs."""

    plan: StepPlan
    sampled: list[Sequence]
    ended: list[Sequence]


class Scheduler:
    """Continuous batching over `limits.max_num_seqs` rows, `limits.max_batched_tokens` tokens a step and a BlockPool.

    `limits.max_batched_tokens` must be at least `limits.max_num_seqs`, so that every running sequence can decode.
    With `prefix_cache`, any two sequences share what they begin with; without, only relatives do.
    """

    def __init__(self, limits: Limits, pool: BlockPool, prefix_cache: bool = False) -> None:
        self.limits = limits
        self.pool = pool
        self._cache = PrefixCache(pool, for_all=prefix_cache)
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._waiting: deque[Sequence] = deque()
        self._refused: Sequence | None = None  # the first waiting one, if there were too few blocks for it
        self._running: list[Sequence] = []  # in order of arrival
        self._launched: deque[_Launched] = deque()
        rows = limits.max_num_seqs
        self._free_rows = list(range(rows - 1, -1, -1))
        # What is known of the sequence in each row; of a free row, nothing.
        self._table = np.zeros((rows, limits.blocks_per_seq), dtype=np.int32)
        self._num_blocks = np.zeros(rows, dtype=np.int32)
        self._num_computed = np.zeros(rows, dtype=np.int32)  # tokens whose K and V were launched
        self._max_tokens = np.zeros(rows, dtype=np.int32)  # prompt and outputs
        # The decoding part of `_running`; replaced, never changed, because plans refer to it.
        self._decoding: list[Sequence] = []
        self._decode_rows = _frozen(np.zeros(0, dtype=np.int32))
        self._decoding_wants_logprobs = False
        self._decoding_changed = False
        self._arange = _frozen(np.arange(max(rows, limits.max_model_len, limits.block_size) + 1, dtype=np.int32))
        self._from_device = _frozen(np.full(rows, FROM_DEVICE, dtype=np.int32))
        self._no_updates = _frozen(np.zeros((0, 3), dtype=np.int32))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequence: Sequence, relative: Sequence | None = None) -> None:
        """Puts a new sequence at the end of the queue and sets its max_outputs; refuses what can never run.

        It shares its beginning with the `relative`, an earlier sequence, even without a prefix cache.
        """
        prompt, wanted = len(sequence.prompt_token_ids), sequence.params.max_tokens
        sequence.max_outputs = allowed_outputs(prompt, wanted, self.limits, self.pool)
        self._cache.join(sequence, relative)
        self._waiting.append(sequence)

    def schedule(self) -> StepPlan | None:
        """Plans the next step as if all earlier ones were done; None when nothing can be launched now."""
        decode_updates = self._extend_decodes()
        budget = self.limits.max_batched_tokens - len(self._decoding)
        chunks: list[tuple[Sequence, int]] = []  # sequences in prefill, tokens of each in this step
        if len(self._decoding) < len(self._running):
            for sequence in self._running:
                if sequence.prefix is not None and budget:
                    chunks.append((sequence, self._chunk(sequence, budget)))
                    budget -= chunks[-1][1]
        admitted: list[Sequence] = []
        while budget and (beginning := self._find_room()) is not None:
            sequence = self._waiting.popleft()
            self._admit(sequence, beginning)
            admitted.append(sequence)
            chunks.append((sequence, self._chunk(sequence, budget)))
            budget -= chunks[-1][1]
        if not self._decoding and not chunks:
            return None

        plan, sampled = self._plan(chunks, admitted, decode_updates)
        self._num_computed[plan.rows] = plan.context_lens
        for sequence in sampled[plan.num_decodes :]:
            sequence.prefix = None  # from now on it decodes
            self._decoding_changed = True
        # A sample makes context_len + 1 tokens; a sequence in the middle of its prefill is further from its end.
        (ended_at,) = (plan.context_lens + 1 >= self._max_tokens[plan.rows]).nonzero()
        ended = [sampled[i] for i in plan.sample_seqs.searchsorted(ended_at).tolist()] if len(ended_at) else []
        for sequence in ended:
            self._leave_row(sequence)
        self._launched.append(_Launched(plan, sampled, ended))
        self.num_steps += 1
        return plan

    def update(
        self, plan: StepPlan, tokens: Int32Array, logprobs: StepLogprobs | None = None
    ) -> tuple[list[TokenEvent], list[FinishEvent]]:
        """Takes the tokens, int32 [R], of the oldest plan whose tokens are not known yet, and tells what they bring.

        Raises LogitsError where an unfinished sequence has a negative one: abort all that are unfinished then.
        """
        launched = self._launched.popleft()
        if launched.plan is not plan or len(tokens) != len(launched.sampled):
            raise RuntimeError(f"tokens of step {plan.step} are not what is awaited for step {launched.plan.step}")
        if tokens.min(initial=0) < 0:
            for sequence, token in zip(launched.sampled, tokens.tolist(), strict=True):
                if token < 0 and sequence.finish_reason is None:
                    raise LogitsError(sequence.seq_id)
        if logprobs is not None:
            for i, sequence in enumerate(launched.sampled):
                sequence.keep_logprobs(logprobs, i)
        accepted: list[tuple[int, int]] = []
        finished: list[FinishEvent] = []
        for sequence, token in zip(launched.sampled, tokens.tolist(), strict=True):
            if sequence.finish_reason is not None:
                continue  # it finished while this step was on its way
            sequence.output_token_ids.append(token)
            if token in sequence.stop_ids:
                finished.append(self.finish(sequence, "stop"))
            else:
                accepted.append((sequence.seq_id, token))
        finished += [self.finish(s, "length") for s in launched.ended if s.finish_reason is None]
        # TokenEvent(*pair) for each, at a third of the cost: this is most of what a step of 256 decodes costs.
        return list(map(tuple.__new__, repeat(TokenEvent), accepted)), finished

    def finish(self, sequence: Sequence, reason: FinishReason) -> FinishEvent:
        """Ends an unfinished sequence, wherever it is; what is on its way for it will be discarded."""
        if sequence.finish_reason is not None:
            raise RuntimeError(f"sequence {sequence.seq_id} has already finished")
        if sequence.row >= 0:
            self._leave_row(sequence)
        elif sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
            sequence.prefix = None
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        return FinishEvent(sequence.seq_id, reason, sequence)

    def _extend_decodes(self) -> Int32Array:
        """Gives a block to each decode that starts one, preempting if need be. Returns block updates, int32 [U, 3]."""
        while True:
            if self._decoding_changed:
                self._decoding = [s for s in self._running if s.prefix is None]
                self._decode_rows = _frozen(np.array([s.row for s in self._decoding], dtype=np.int32))
                self._decoding_wants_logprobs = _want_logprobs(self._decoding)
                self._decoding_changed = False
            if not self._decoding:
                return self._no_updates
            columns = self._num_computed[self._decode_rows] // self.pool.block_size
            starting = np.flatnonzero(columns == self._num_blocks[self._decode_rows])
            if len(starting) <= self.pool.num_free:
                break
            self._preempt(self._running[-1])
        if not len(starting):
            return self._no_updates
        rows, columns = self._decode_rows[starting], columns[starting]
        blocks = self.pool.allocate(len(starting))
        self._table[rows, columns] = blocks
        self._num_blocks[rows] += 1
        return np.stack((rows, columns, blocks), axis=1)

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """How many tokens of its prefill a sequence gets; the blocks that they fill can be found from now on."""
        assert sequence.prefix is not None
        done = int(self._num_computed[sequence.row])
        count = min(budget, len(sequence.prefix) - done)
        self._cache.add(sequence, done + count, self._table[sequence.row])
        return count

    def _find_room(self) -> Beginning | None:
        """What the first waiting sequence finds of its beginning, if it can start; nobody overtakes it.

        Its tokens must fit, and leave a block for each running sequence: else starting it soon costs a preemption.
        (With a quarter of the blocks that could be used, this saves 20% of the tokens computed for 1% more steps.)
        """
        if not self._waiting or not self._free_rows:
            return None
        first = self._waiting[0]
        if len(first.output_token_ids) < first.num_launched:
            return None  # preempted, and not all its tokens are known
        if first is self._refused:
            return None  # blocks only get scarcer until someone leaves a row
        if first.prefix is None:
            known = first.prompt_token_ids + first.output_token_ids
            first.prefix = np.fromiter(known, np.int32, len(known))
        beginning = self._cache.find(first)
        spare = len(self._running) + 1 if self._running else 0
        own = self.pool.blocks_for(len(first.prefix)) - len(beginning.blocks)
        if own + self.pool.num_unowned(beginning.blocks) + spare > self.pool.num_free:
            self._refused = first
            return None
        return beginning

    def _admit(self, sequence: Sequence, beginning: Beginning) -> None:
        """Gives a sequence a row, and blocks for all its tokens known so far: those of its beginning, and own ones."""
        assert sequence.prefix is not None
        shared = beginning.blocks
        self.pool.share(shared)
        own = self.pool.allocate(self.pool.blocks_for(len(sequence.prefix)) - len(shared))
        blocks = np.concatenate((shared, own))
        sequence.row = row = self._free_rows.pop()
        sequence.status = Status.RUNNING
        self._cache.start(sequence, beginning)
        self._table[row, : len(blocks)] = blocks
        self._num_blocks[row] = len(blocks)
        self._num_computed[row] = len(shared) * self.pool.block_size
        if sequence.num_cached is None:
            sequence.num_cached = len(shared) * self.pool.block_size
            self.num_cached_tokens += sequence.num_cached
        self._max_tokens[row] = len(sequence.prompt_token_ids) + sequence.max_outputs
        self._running.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes row and blocks back; the sequence starts again, from all its tokens, when there is room for it."""
        self._leave_row(sequence)
        sequence.status = Status.WAITING
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _leave_row(self, sequence: Sequence) -> None:
        row = sequence.row
        if sequence.prefix is None:  # each launched decode, and the end of the prefill, sampled one token
            computed = int(self._num_computed[row])
            sequence.num_launched = computed + 1 - len(sequence.prompt_token_ids)
            self._decoding_changed = True
            self._cache.add(sequence, computed, self._table[row])
        self.pool.free(self._table[row, : self._num_blocks[row]])
        self._free_rows.append(row)
        self._running.remove(sequence)
        sequence.row = -1
        sequence.prefix = None
        self._refused = None

    def _plan(
        self, chunks: list[tuple[Sequence, int]], admitted: list[Sequence], decode_updates: Int32Array
    ) -> tuple[StepPlan, list[Sequence]]:
        """The plan of a step: all decodes, then `chunks`; and the sequences that sample, in the plan's order."""
        num_decodes, sampled, rows = len(self._decoding), self._decoding, self._decode_rows
        query_start = self._arange[: num_decodes + 1]
        sample_seqs = sample_tokens = self._arange[:num_decodes]
        token_ids, block_updates = self._from_device[:num_decodes], decode_updates
        positions = self._num_computed[rows]
        context_lens = sample_positions = positions + 1
        columns = positions // self.pool.block_size
        slots = (self._table[rows, columns] - columns) * self.pool.block_size + positions
        if chunks:
            chunk_rows = np.array([s.row for s, _ in chunks], dtype=np.int32)
            rows = np.concatenate((rows, chunk_rows))
            chunk_starts = np.array(list(accumulate((count for _, count in chunks), initial=num_decodes)), np.int32)
            query_start = np.concatenate((query_start[:-1], chunk_starts))
            starts = self._num_computed[chunk_rows]
            ends = starts + chunk_starts[1:] - chunk_starts[:-1]
            context_lens = np.concatenate((context_lens, ends))
            tokens = [(token_ids, positions, slots)]
            reached = list(range(num_decodes))
            for (sequence, _), start, end in zip(chunks, starts.tolist(), ends.tolist(), strict=True):
                assert sequence.prefix is not None
                tokens.append((sequence.prefix[start:end], self._arange[start:end], self._slots(sequence, start, end)))
                if end == len(sequence.prefix):
                    reached.append(num_decodes + len(tokens) - 2)
            token_ids, positions, slots = (np.concatenate(parts) for parts in zip(*tokens, strict=True))
            sample_seqs = np.array(reached, dtype=np.int32)
            sample_tokens = query_start[sample_seqs + 1] - 1
            sample_positions = context_lens[sample_seqs]
            sampled = self._decoding + [chunks[i - num_decodes][0] for i in reached[num_decodes:]]
            block_updates = np.concatenate((decode_updates, *(self._row_blocks(s.row) for s in admitted)))
        return StepPlan(
            step=self.num_steps,
            num_decodes=num_decodes,
            rows=_frozen(rows),
            query_start=_frozen(query_start),
            context_lens=_frozen(context_lens),
            token_ids=_frozen(token_ids),
            positions=_frozen(positions),
            slots=_frozen(slots),
            sample_seqs=_frozen(sample_seqs),
            sample_tokens=_frozen(sample_tokens),
            sample_positions=_frozen(sample_positions),
            block_updates=_frozen(block_updates),
            row_updates=tuple((s.row, s.params) for s in admitted),
            histories=tuple(History.of(s) for s in admitted if s.params.has_penalties),
            wants_logprobs=self._decoding_wants_logprobs or _want_logprobs(sampled[num_decodes:]),
        ), sampled

    def _slots(self, sequence: Sequence, start: int, end: int) -> Int32Array:
        """Where K and V of a sequence's tokens `start` to `end` are stored, int32 [end - start]."""
        size = self.pool.block_size
        first = start // size
        blocks = self._table[sequence.row, first : -(-end // size)]
        return np.add.outer(blocks * size, self._arange[:size]).ravel()[start - first * size : end - first * size]

    def _row_blocks(self, row: int) -> Int32Array:
        """All blocks of a row as block updates, int32 [U, 3]."""
        blocks = self._table[row, : self._num_blocks[row]]
        updates = np.empty((len(blocks), 3), dtype=np.int32)
        updates[:, 0], updates[:, 1], updates[:, 2] = row, self._arange[: len(blocks)], blocks
        return updates


def _want_logprobs(sequences: list[Sequence]) -> bool:
    return any(s.params.logprobs is not None for s in sequences)


def _frozen(array: Int32Array) -> Int32Array:
    array.flags.writeable = False
    return array
