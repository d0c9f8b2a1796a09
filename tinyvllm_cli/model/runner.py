"""ModelRunner: turns a StepPlan into tensors, runs the model, samples, and hands the tokens back when asked.

`launch` is asynchronous on CUDA: it copies what changed and starts the work on the runner's stream; `collect` waits for
the oldest launched step. What a step needs from the one before (the last token of each row) never leaves the device.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinyvllm_cli import ops
from tinyvllm_cli.engine.step_plan import StepLogprobs
from tinyvllm_cli.memory.plan import ITEMSIZE, BufferPlan, KVPlan, Limits, decode_splits
from tinyvllm_cli.model.llama import Batch, Llama, StageHook
from tinyvllm_cli.model.rope import rope_table
from tinyvllm_cli.model.sampling import SamplingState

if TYPE_CHECKING:
    from tinyvllm_cli.checkpoint.config import ModelConfig
    from tinyvllm_cli.checkpoint.weights import Weights
    from tinyvllm_cli.engine.step_plan import StepPlan

Int32Array = npt.NDArray[np.int32]
BUCKETS = (*range(1, 9), 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Batch sizes that decode is captured for; a batch runs in the smallest one that holds it, padded with rows -1."""
IN_FLIGHT = 4
"""Steps that may be launched and not yet collected."""
ALIGN = 4
"""Packed int32 inputs start at multiples of so many elements (16 bytes)."""


class ModelRunner:
    """Runs StepPlans on one device.

    Args:
        config, weights: the model; weights decide device and activation dtype.
        limits, plan, kv_plan: what `memory.plan` made of them; the runner allocates exactly that.
        graphs: capture decode steps in CUDA graphs (CUDA only).
        hook: called after each stage of an eager step.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        limits: Limits,
        plan: BufferPlan,
        kv_plan: KVPlan,
        *,
        graphs: bool = True,
        hook: StageHook | None = None,
    ) -> None:
        self.config, self.limits, self.hook = config, limits, hook
        self.device = weights.embed.device
        self.cuda = self.device.type == "cuda"
        self.graphs = graphs and self.cuda
        self.arena = torch.empty(plan.total_bytes, dtype=torch.uint8, device=self.device)
        self.buffers = {b.name: _view(self.arena, b.offset, b.shape, b.dtype) for b in plan.buffers}
        self.kv_cache = torch.empty(
            config.num_layers,
            kv_plan.num_blocks,
            config.num_kv_heads,
            2,
            kv_plan.block_size,
            config.head_dim,
            dtype=weights.embed.dtype,
            device=self.device,
        )
        rope_table(self.buffers["rope_table"], config.rope, config.head_dim)
        self.block_table = self.buffers["block_table"].zero_()
        self.buffers["attention_counters"].zero_()
        self.buffers["sample_counters"].zero_()
        self.model = Llama(config, weights, self.buffers, self.kv_cache, self.block_table)
        self.params = SamplingState(self.buffers["sampling_params"], self.buffers["token_counts"])
        state = self.buffers["decode_state"].zero_()[:, : limits.max_num_seqs]
        self.decode_rows, self.next_positions, self.token_ids, self.positions = state[:4]
        self.slots, self.context_lens, self.last_tokens, self.sampled = state[4:]
        self.stream = torch.cuda.Stream(self.device) if self.cuda else None
        if self.stream:  # weights and buffers were filled on the current stream
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.captured: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}  # by bucket, and whether with penalties
        self.replayed_rows: Int32Array | None = None  # rows of the last step, if that was a graph's
        size = self.buffers["step_inputs"].size(0)
        self.uploads = [_host(size, self.cuda) for _ in range(IN_FLIGHT)]
        self.downloads = [_host(limits.max_num_seqs, self.cuda) for _ in range(IN_FLIGHT)]
        self.logprob_downloads: list[tuple[Tensor, Tensor]] = []  # ids and values for each slot, once someone asks
        self.told: StepLogprobs | None = None
        self.events = [torch.cuda.Event() for _ in range(IN_FLIGHT)] if self.cuda else []
        self.pending: deque[tuple[int, int]] = deque()  # (slot of downloads, number of tokens)
        self.launched = 0

    def launch(self, plan: StepPlan) -> None:
        """Starts one step; its tokens are had from `collect`, in the order of launches."""
        if len(self.pending) == IN_FLIGHT:
            raise RuntimeError(f"{IN_FLIGHT} steps are in flight; collect one before launching another")
        slot = self.launched % IN_FLIGHT
        self.launched += 1
        with torch.inference_mode(), self._on_stream():
            self._update_state(plan)
            sampled = self._replay(plan, slot) if self.graphs and plan.is_decode_only else self._eager(plan, slot)
            self.downloads[slot][: sampled.size(0)].copy_(sampled, non_blocking=True)
            if plan.wants_logprobs:
                self._download_logprobs(slot, sampled.size(0))
            if self.cuda:
                self.events[slot].record()
        self.pending.append((slot, sampled.size(0)))

    def collect(self) -> Int32Array:
        """Waits for the oldest launched step and returns its tokens, int32 [R], in the order of `sample_seqs`."""
        slot, count = self.pending.popleft()
        if self.cuda:
            self.events[slot].synchronize()
        tokens: Int32Array = self.downloads[slot][:count].numpy().copy()
        if self.logprob_downloads:
            ids, values = self.logprob_downloads[slot]
            self.told = StepLogprobs(ids[:count].numpy(), values[:count].numpy())
        return tokens

    def logprobs(self) -> StepLogprobs:
        """Of the step last collected, whose plan asked for them; valid until another step is launched."""
        assert self.told is not None
        return self.told

    def _download_logprobs(self, slot: int, count: int) -> None:
        ids, values = self.buffers["logprob_ids"], self.buffers["logprob_values"]
        if not self.logprob_downloads:
            size = ids.numel()
            self.logprob_downloads = [
                (_host(size, self.cuda).view_as(ids), _host(size, self.cuda).view(torch.float32).view_as(values))
                for _ in range(IN_FLIGHT)
            ]
        host_ids, host_values = self.logprob_downloads[slot]
        host_ids[:count].copy_(ids[:count], non_blocking=True)
        host_values[:count].copy_(values[:count], non_blocking=True)

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def _update_state(self, plan: StepPlan) -> None:
        """Applies what the plan says has changed: parameters and tokens of rows, entries of the block table."""
        if plan.row_updates:
            self.params.update(plan.row_updates)
        if plan.histories:
            self.params.remember(plan.histories)
        if len(plan.block_updates):
            row, column, block = plan.block_updates.T
            index = torch.from_numpy(row.astype(np.int64) * self.block_table.size(1) + column)
            blocks = torch.from_numpy(block.copy())
            self.block_table.view(-1).index_copy_(0, self._to_device(index), self._to_device(blocks))

    def _to_device(self, tensor: Tensor) -> Tensor:
        # From pageable memory CUDA stages the bytes before it returns: the source may be reused at once.
        return tensor.to(self.device, non_blocking=True)

    def _upload(self, slot: int, arrays: list[Int32Array]) -> list[Tensor]:
        """Copies int32 arrays to the device in one transfer and returns their views there."""
        host, target = self.uploads[slot], self.buffers["step_inputs"]
        staging = host.numpy()
        views, offset = [], 0
        for array in arrays:
            staging[offset : offset + len(array)] = array
            views.append(target[offset : offset + len(array)])
            offset += -(-len(array) // ALIGN) * ALIGN
        target[:offset].copy_(host[:offset], non_blocking=True)
        return views

    def _eager(self, plan: StepPlan, slot: int) -> Tensor:
        self.replayed_rows = None
        n = plan.num_decodes
        arrays = [
            plan.token_ids,
            plan.positions,
            plan.slots,
            plan.rows[:n],
            plan.context_lens[:n],
            plan.sample_tokens,
            plan.rows[plan.sample_seqs],
            plan.sample_positions,
        ]
        if not plan.is_decode_only:
            arrays += [plan.rows[n:], plan.context_lens[n:], plan.query_start[n:] - np.int32(n)]
        inputs = self._upload(slot, arrays)
        token_ids, positions, slots, rows, context_lens, sample_tokens, sample_rows, sample_positions = inputs[:8]
        if n:
            torch.index_select(self.last_tokens, 0, rows, out=token_ids[:n])
        batch = Batch(token_ids, positions, slots, rows, context_lens)
        if not plan.is_decode_only:
            batch.chunk_rows, batch.chunk_lens, batch.query_start = inputs[8:]
            batch.max_query_len = int(np.diff(plan.query_start[n:]).max())
        if len(plan.sample_tokens) < plan.num_tokens:
            batch.sample_tokens = sample_tokens
        logits = self.model.forward(batch, decode_splits(max(n, 1), self.config.num_kv_heads), self.hook)
        sampled = self.sampled[: len(plan.sample_seqs)]
        if len(plan.sample_seqs):
            self._sample(sampled, logits, sample_rows, sample_positions, self.params.any_penalties(plan.rows))
            if plan.wants_logprobs:
                self._logprobs(sampled, logits, sample_rows)
        if self.hook:
            self.hook("sample", -1)
        return sampled

    def _sample(self, sampled: Tensor, logits: Tensor, rows: Tensor, positions: Tensor, penalties: bool) -> None:
        p, b = self.params, self.buffers
        if penalties:
            ops.penalize(logits, p.token_counts, rows, p.repetition, p.presence, p.frequency)
        ops.sample(
            sampled,
            self.last_tokens,
            logits,
            rows,
            positions,
            p.temperature,
            p.top_k,
            p.top_p,
            p.min_p,
            p.seeds,
            b["sample_workspace"],
            b["sample_counters"],
        )
        if penalties:
            ops.count_tokens(p.token_counts, sampled, rows)

    def _logprobs(self, sampled: Tensor, logits: Tensor, rows: Tensor) -> None:
        count = sampled.size(0)
        values, ids = self.buffers["logprob_values"][:count], self.buffers["logprob_ids"][:count]
        ops.logprobs(values, ids, logits, sampled, rows, self.params.num_logprobs)

    def _replay(self, plan: StepPlan, slot: int) -> Tensor:
        """One decode step by its captured graph; nothing is uploaded while the same rows go on decoding."""
        bucket, num_seqs = self._bucket(plan.num_seqs), plan.num_seqs
        kind = bucket, self.params.any_penalties(plan.rows)
        if kind not in self.captured:
            self._capture(*kind)
            self.replayed_rows = None
        if self.replayed_rows is not plan.rows:  # the scheduler keeps the array while the same rows go on
            padding = np.full(bucket - plan.num_seqs, -1, dtype=np.int32)
            rows, positions = self._upload(
                slot, [np.concatenate((plan.rows, padding)), np.concatenate((plan.positions, padding))]
            )
            self.decode_rows[:bucket].copy_(rows)
            self.next_positions[:bucket].copy_(positions)
            self.replayed_rows = plan.rows
        self.captured[kind].replay()
        if plan.wants_logprobs:  # outside of the graph, from the logits that it has left behind
            self._logprobs(self.sampled[:num_seqs], self.buffers["logits"][:num_seqs], self.decode_rows[:num_seqs])
        return self.sampled[:num_seqs]

    def _bucket(self, num_seqs: int) -> int:
        largest = self.limits.max_num_seqs
        return next((b for b in BUCKETS if num_seqs <= b <= largest), largest)

    def _capture(self, bucket: int, penalties: bool) -> None:
        bucket_rows = self.decode_rows[:bucket]
        bucket_rows.fill_(-1)  # padding only: the warm-up and the capture change nothing
        self._decode(bucket, penalties)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.captured.values())).pool() if self.captured else None
        with torch.cuda.graph(graph, pool=pool, stream=self.stream):
            self._decode(bucket, penalties)
        self.captured[bucket, penalties] = graph

    def _decode(self, bucket: int, penalties: bool) -> None:
        rows, context_lens = self.decode_rows[:bucket], self.context_lens[:bucket]
        token_ids, positions, slots = self.token_ids[:bucket], self.positions[:bucket], self.slots[:bucket]
        ops.decode_inputs(
            token_ids,
            positions,
            slots,
            context_lens,
            self.next_positions[:bucket],
            self.last_tokens,
            rows,
            self.block_table,
            self.limits.block_size,
        )
        batch = Batch(token_ids, positions, slots, rows, context_lens)
        logits = self.model.forward(batch, decode_splits(bucket, self.config.num_kv_heads))
        self._sample(self.sampled[:bucket], logits, rows, context_lens, penalties)


def _view(arena: Tensor, offset: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    nbytes = ITEMSIZE[dtype] * int(np.prod(shape))
    return arena[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)


def _host(size: int, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.int32, pin_memory=pinned)
