"""SamplingState: how the tokens of each row are chosen, on the host and on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from tinyvllm_cli.engine.sequence import SamplingParams
    from tinyvllm_cli.engine.step_plan import History

FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
INTEGERS = ("top_k", "num_logprobs")


class SamplingState:
    """Sampling parameters of every row: a host mirror, copied to the device whole when some row changed.

    Attributes, each [max_num_seqs] on the device: seeds int64; temperature, top_p, min_p, repetition, presence,
    frequency fp32; top_k, num_logprobs (-1: none) int32. token_counts as given.

    Args:
        buffer: int32 [10, padded], 40 bytes for each of max_num_seqs rows and for padding to a multiple of 64 rows.
        token_counts: int32 [max_num_seqs, V], of `ops.penalize`; only rows with penalties are ever written or read.
    """

    def __init__(self, buffer: Tensor, token_counts: Tensor) -> None:
        self.token_counts = token_counts
        max_num_seqs = token_counts.size(0)
        self.device = buffer
        self.host = np.zeros(buffer.shape, dtype=np.int32)

        def views(table: Tensor) -> dict[str, Tensor]:
            floats = dict(zip(FLOATS, table[2:8].view(torch.float32), strict=True))
            named = {
                "seeds": table[:2].view(-1).view(torch.int64),
                **floats,
                **dict(zip(INTEGERS, table[8:], strict=True)),
            }
            return {name: row[:max_num_seqs] for name, row in named.items()}

        on_device = views(self.device)
        self.seeds = on_device["seeds"]
        self.temperature, self.top_p, self.min_p = (on_device[name] for name in FLOATS[:3])
        self.repetition, self.presence, self.frequency = (on_device[name] for name in FLOATS[3:])
        self.top_k, self.num_logprobs = (on_device[name] for name in INTEGERS)
        self.mirror = {name: view.numpy() for name, view in views(torch.from_numpy(self.host)).items()}
        self.mirror["top_p"].fill(1)
        self.mirror["repetition"].fill(1)
        self.mirror["num_logprobs"].fill(-1)
        self.penalized = np.zeros(max_num_seqs, dtype=np.bool_)  # rows with penalties, those left behind included
        self.filtered = np.zeros(max_num_seqs, dtype=np.bool_)  # rows that draw from some tokens only
        self.some_penalized = False

    def update(self, row_updates: tuple[tuple[int, SamplingParams], ...]) -> None:
        """Takes the parameters of rows that have new owners."""
        mirror = self.mirror
        for row, p in row_updates:
            mirror["seeds"][row] = p.seed
            mirror["temperature"][row] = p.temperature
            mirror["top_p"][row] = p.top_p
            mirror["min_p"][row] = p.min_p
            mirror["repetition"][row] = p.repetition_penalty
            mirror["presence"][row] = p.presence_penalty
            mirror["frequency"][row] = p.frequency_penalty
            mirror["top_k"][row] = min(p.top_k, self.token_counts.size(1))  # int32; all tokens are no fewer
            mirror["num_logprobs"][row] = -1 if p.logprobs is None else p.logprobs
            self.penalized[row] = p.has_penalties
            self.filtered[row] = p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        self.some_penalized = bool(self.penalized.any())
        self.device.copy_(torch.from_numpy(self.host), non_blocking=True)

    def any_penalties(self, rows: npt.NDArray[np.int32]) -> bool:
        """Whether some of `rows` has penalties."""
        return self.some_penalized and bool(self.penalized[rows].any())

    def all_plain(self, rows: npt.NDArray[np.int32], may_draw: bool) -> bool:
        """Whether each of `rows` just takes the largest logit or, if they may draw, any token by its probability."""
        return not (self.filtered if may_draw else self.mirror["temperature"])[rows].any()

    def remember(self, histories: tuple[History, ...]) -> None:
        """Takes the tokens of rows that have new owners with penalties."""
        for row, token_ids, num_prompt in histories:
            counts = self.token_counts[row].zero_()
            tokens = torch.from_numpy(token_ids).long()
            prompt, answer = (
                part[(part >= 0) & (part < len(counts))].to(counts.device) for part in tokens.tensor_split([num_prompt])
            )
            counts.index_fill_(0, prompt, 1)
            counts.index_add_(0, answer, torch.full_like(answer, 2, dtype=counts.dtype))
