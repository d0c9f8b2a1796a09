"""StepPlan: everything that a runner needs for one step, as flat arrays. All index arithmetic ends here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tinyvllm_cli.engine.sequence import SamplingParams, Sequence

    Int32Array = npt.NDArray[np.int32]
    Float32Array = npt.NDArray[np.float32]

FROM_DEVICE = -1
"""In `StepPlan.token_ids`: the token is the last one sampled for this row; only the runner has it."""


class History(NamedTuple):
    """All tokens known of the sequence in `row`, int32 [n]; the first `num_prompt` are its prompt."""

    row: int
    token_ids: Int32Array
    num_prompt: int

    @classmethod
    def of(cls, sequence: Sequence) -> History:
        """Of a sequence that is being admitted."""
        assert sequence.prefix is not None
        return cls(sequence.row, sequence.prefix, len(sequence.prompt_token_ids))


class StepLogprobs(NamedTuple):
    """What a runner tells of R sampled tokens, as `ops.logprobs` fills it: int32 and float32 [R, 1 + MAX_LOGPROBS]."""

    token_ids: Int32Array
    values: Float32Array


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over S sequences and T tokens; the first `num_decodes` sequences have one token each.

    A running sequence owns a `row` (0 <= row < max_num_seqs) from its admission until it finishes or is preempted. The
    runner keeps, per row: the block table, the last sampled token and the sampling parameters. The plan carries only
    what changed in them; runners apply `row_updates` and `block_updates` before they compute.

    A row may begin behind its first token, in blocks that other rows have filled or fill in this very step: in each
    layer, a runner stores all K and V of a step before a prefill reads any.

    Attributes:
        step: number of the plan, counted from 0.
        num_decodes: how many sequences (all of them first) decode one token whose id is `FROM_DEVICE`.
        rows: int32 [S], the row of each sequence.
        query_start: int32 [S + 1], offsets of each sequence's tokens in the token arrays.
        context_lens: int32 [S], tokens in the cache once this step's tokens are stored.
        token_ids: int32 [T], `FROM_DEVICE` for decodes.
        positions: int32 [T].
        slots: int32 [T], block * block_size + offset, where each token's K and V are stored.
        sample_seqs: int32 [R], indices into `rows` of the sequences that sample in this step (decodes always; a
            prefill only when its chunk reaches the end of what is known). Ascending.
        sample_tokens: int32 [R], index in the token arrays of each sampling sequence's last token.
        sample_positions: int32 [R], position that the sampled token will have (the counter of its random draw).
        block_updates: int32 [U, 3], (row, column, block): new entries of the block table.
        row_updates: (row, sampling parameters) of sequences admitted in this step.
        histories: what those of them that ask for penalties know of their tokens.
        wants_logprobs: whether some sampling sequence asks for log-probabilities; then the runner has them ready when
            the step's tokens are collected.
    """

    step: int
    num_decodes: int
    rows: Int32Array
    query_start: Int32Array
    context_lens: Int32Array
    token_ids: Int32Array
    positions: Int32Array
    slots: Int32Array
    sample_seqs: Int32Array
    sample_tokens: Int32Array
    sample_positions: Int32Array
    block_updates: Int32Array
    row_updates: tuple[tuple[int, SamplingParams], ...]
    histories: tuple[History, ...] = ()
    wants_logprobs: bool = False

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode_only(self) -> bool:
        return self.num_decodes == len(self.rows)
