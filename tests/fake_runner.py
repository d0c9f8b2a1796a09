"""A runner without a model: a paged cache of token ids, and a next token that is a hash of all that it reads there.

Beside each token id the cache holds what stands for K and V: a hash of that token and all before it.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from dataclasses import fields
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.engine.sequence import MAX_LOGPROBS, SamplingParams, TokenLogprobs
from tinyvllm_cli.engine.step_plan import FROM_DEVICE, StepLogprobs, StepPlan
from tinyvllm_cli.memory.plan import Limits

VOCAB = 23
EOS = 3


def next_token(prefix: list[int], params: SamplingParams, num_prompt: int = 0) -> int:
    """Depends on every token of the prefix, in its order, and on the seed; with penalties on num_prompt too."""
    known = num_prompt if params.has_penalties else 0
    return zlib.crc32(np.array([params.seed, known, *prefix], dtype=np.int32).tobytes()) % VOCAB


def stored(token: int, before: int) -> int:
    """What stands for K and V of a token behind one whose own are `before`, 0 for none. As K and V of a model, it
    depends on all tokens up to this one, not on where it is stored."""
    return zlib.crc32(f"{token}".encode(), before + 1)


def fake_logprobs(token: int, count: int) -> TokenLogprobs:
    """What FakeRunner tells of a token, to a sequence that asks for `count` alternatives; it knows no more than 5."""
    ids = [token, *((token + place) % VOCAB for place in range(1, 6))][: count + 1]
    return TokenLogprobs(ids, [-token - place / 2 for place in range(len(ids))])


def plain_result(prompt: list[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], str]:
    """What a sequence must give when it is alone: its output tokens and its finish reason."""
    tokens = list(prompt)
    stops = {*params.stop_token_ids} if params.ignore_eos else {*params.stop_token_ids, EOS}
    while True:
        tokens.append(next_token(tokens, params, len(prompt)))
        outputs = tokens[len(prompt) :]
        if outputs[-1] in stops:
            return outputs, "stop"
        if len(outputs) == params.max_tokens or len(tokens) == max_model_len:
            return outputs, "length"


class FakeRunner:
    """Runs a step at some random moment between its launch and the collection of its tokens, always in order.

    It trusts only what a real runner has: its own block table, last tokens and parameters, kept up by the plans. What a
    new owner of a row or block did not write itself is invalid; but a row that begins behind its first token shares the
    blocks before that, which must hold K and V of exactly its own tokens. Nothing is ever written over.
    """

    def __init__(self, limits: Limits, num_blocks: int, seed: int = 0) -> None:
        self.limits = limits
        self.random = random.Random(seed)
        self.memory = np.full(num_blocks * limits.block_size, -1, dtype=np.int32)
        self.kv = np.zeros(num_blocks * limits.block_size, dtype=np.int64)
        self.table = np.full((limits.max_num_seqs, limits.blocks_per_seq), -1, dtype=np.int32)
        self.last_tokens = np.full(limits.max_num_seqs, -1, dtype=np.int32)
        self.next_positions = np.full(limits.max_num_seqs, -1, dtype=np.int32)
        self.params: dict[int, SamplingParams] = {}
        self.histories: dict[int, tuple[list[int], int]] = {}
        self.waiting: deque[tuple[StepPlan, list[bytes]]] = deque()
        self.done: deque[npt.NDArray[np.int32]] = deque()
        self.collected = np.zeros(0, dtype=np.int32)
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        check_form(plan, self.limits)
        self.waiting.append((plan, contents(plan)))
        self.plans.append(plan)

    def collect(self) -> npt.NDArray[np.int32]:
        while not self.done or (self.waiting and self.random.random() < 0.5):
            plan, launched_contents = self.waiting.popleft()
            assert contents(plan) == launched_contents, "a plan was changed after its launch"
            self.done.append(self.execute(plan))
        self.collected = self.done.popleft()
        return self.collected

    def logprobs(self) -> StepLogprobs:
        shape = (len(self.collected), 1 + MAX_LOGPROBS)
        told = StepLogprobs(np.full(shape, -1, dtype=np.int32), np.full(shape, -np.inf, dtype=np.float32))
        for i, token in enumerate(self.collected.tolist()):
            ids, values = fake_logprobs(token, MAX_LOGPROBS)
            told.token_ids[i, : len(ids)], told.values[i, : len(ids)] = ids, values
        return told

    def execute(self, plan: StepPlan) -> npt.NDArray[np.int32]:
        size = self.limits.block_size
        for row, params in plan.row_updates:
            self.params[row] = params
            self.table[row] = -1
            self.last_tokens[row] = -1
            self.next_positions[row] = plan.positions[plan.query_start[plan.rows.tolist().index(row)]]
            assert self.next_positions[row] % size == 0
            self.histories.pop(row, None)
        for row, tokens, num_prompt in plan.histories:
            self.histories[row] = (tokens.tolist(), num_prompt)
        for row, column, block in plan.block_updates:
            assert self.table[row, column] == -1
            self.table[row, column] = block
            if column * size >= self.next_positions[row]:
                self.memory[block * size : (block + 1) * size] = -1
        for i, row in enumerate(plan.rows):
            start, end = plan.query_start[i], plan.query_start[i + 1]
            positions = plan.positions[start:end]
            first = self.next_positions[row]
            assert positions.tolist() == list(range(first, plan.context_lens[i]))
            self.next_positions[row] = plan.context_lens[i]
            blocks = self.table[row, positions // size]
            assert (blocks >= 0).all()
            assert (plan.slots[start:end] == blocks * size + positions % size).all()
            tokens = self.last_tokens[row] if i < plan.num_decodes else plan.token_ids[start:end]
            assert np.min(tokens) >= 0
            assert (self.memory[plan.slots[start:end]] == -1).all(), "what was stored is overwritten"
            self.memory[plan.slots[start:end]] = tokens
            self.store(row, first, plan.context_lens[i])
        sampled = []
        for i, position in zip(plan.sample_seqs, plan.sample_positions, strict=True):
            row = plan.rows[i]
            assert position == plan.context_lens[i]
            positions = np.arange(position)
            slots = self.table[row, positions // size] * size + positions % size
            prefix = self.memory[slots].tolist()
            assert (
                self.kv[slots].tolist() == list(accumulate(prefix, lambda kv, token: stored(token, kv), initial=0))[1:]
            )
            history, num_prompt = self.histories.get(row, (prefix, 0))
            assert (row in self.histories) == self.params[row].has_penalties
            assert history == prefix
            self.last_tokens[row] = next_token(prefix, self.params[row], num_prompt)
            if row in self.histories:
                history.append(int(self.last_tokens[row]))
            sampled.append(self.last_tokens[row])
        return np.array(sampled, dtype=np.int32)

    def store(self, row: int, start: int, end: int) -> None:
        """K and V of a row's tokens from `start` to `end`, from their ids and what stands before them."""
        size = self.limits.block_size
        slots = [int(self.table[row, p // size]) * size + p % size for p in range(max(start - 1, 0), end)]
        before = 0
        if start:
            assert self.memory[slots[0]] >= 0, "it begins behind what nobody has stored"
            before = int(self.kv[slots.pop(0)])
        for slot in slots:
            before = stored(int(self.memory[slot]), before)
            self.kv[slot] = before


def contents(plan: StepPlan) -> list[bytes]:
    """All arrays of a plan, copied."""
    values = [getattr(plan, field.name) for field in fields(plan)]
    return [v.tobytes() for v in values if isinstance(v, np.ndarray)]


def check_form(plan: StepPlan, limits: Limits) -> None:
    """What every plan must fulfil by itself."""
    for field in fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, np.ndarray):
            assert value.dtype == np.int32, field.name
            assert not value.flags.writeable, field.name
    seqs, tokens, n = plan.num_seqs, plan.num_tokens, plan.num_decodes
    assert 1 <= seqs <= limits.max_num_seqs
    assert 1 <= tokens <= limits.max_batched_tokens
    assert len(set(plan.rows.tolist())) == seqs
    assert len(set(plan.slots.tolist())) == tokens == len(plan.positions)
    assert plan.query_start[0] == 0
    assert plan.query_start[-1] == tokens
    assert (np.diff(plan.query_start) >= 1).all()
    assert plan.query_start[: n + 1].tolist() == list(range(n + 1))
    assert (plan.token_ids[:n] == FROM_DEVICE).all()
    assert (plan.token_ids[n:] >= 0).all()
    assert plan.sample_seqs[:n].tolist() == list(range(n))
    assert (np.diff(plan.sample_seqs) >= 1).all()
    assert (plan.sample_tokens == plan.query_start[plan.sample_seqs + 1] - 1).all()
    assert (plan.context_lens < limits.max_model_len).all()
    assert plan.block_updates.shape == (len(plan.block_updates), 3)
