"""ModelRunner: turns a StepPlan into tensors, runs the model, samples, and hands the tokens back when asked.

`launch` is asynchronous on CUDA: it copies what changed and starts the work on the runner's stream; `collect` waits for
the oldest launched step. What a step needs from the one before (the last token of each row) never leaves the device.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinyvllm_cli import gemm, ops
from tinyvllm_cli.engine.step_plan import StepLogprobs
from tinyvllm_cli.errors import UserError
from tinyvllm_cli.memory import decode_step
from tinyvllm_cli.memory.plan import ITEMSIZE, BufferPlan, KVPlan, Limits
from tinyvllm_cli.model.decode_share import FUSED_CONTEXTS, DecodeShare, decode_share
from tinyvllm_cli.model.graphs import CudaCapture, StepGraphs, decode_bucket, padded_size, step_size
from tinyvllm_cli.model.llama import Batch, Chunks, Llama, StageHook
from tinyvllm_cli.model.rope import rope_table
from tinyvllm_cli.model.sampling import SamplingState

if TYPE_CHECKING:
    from tinyvllm_cli.checkpoint.config import ModelConfig
    from tinyvllm_cli.checkpoint.weights import Weights
    from tinyvllm_cli.engine.step_plan import StepPlan

Int32Array = npt.NDArray[np.int32]
IN_FLIGHT = decode_step.TOLD_STEPS
"""Steps that may be launched and not yet collected."""
SUSPICIOUS_SECONDS = 1.0
"""A step that took longer may hold a decode kernel that gave up waiting, which takes it 2 seconds."""
ALIGN = 4
"""Packed int32 inputs start at multiples of so many elements (16 bytes)."""


class ModelRunner:
    """Runs StepPlans on one device.

    Args:
        config, weights: the model; weights decide device and activation dtype.
        limits, plan, kv_plan: what `memory.plan` made of them; the runner allocates exactly that.
        graphs: capture steps in CUDA graphs (CUDA only), all but large ones that also decode.
        hook: called after each stage of a step; none is captured then.
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
        self.can_fuse = (
            self.cuda
            and torch.cuda.get_device_capability(self.device)[0] in decode_step.CAPABILITIES
            and decode_step.is_supported(config, str(weights.embed.dtype).removeprefix("torch."))
            and limits.block_size <= decode_step.MAX_BLOCK_SIZE
        )
        self.buffers["decode_exchange"].fill_(-1)[: decode_step.HEADER_WORDS] = 0
        # Fused steps in turn put their tokens here. A kernel's writes to the host are there when an event behind it is.
        self.told = _host(IN_FLIGHT * decode_step.MAX_ROWS, self.cuda).view(IN_FLIGHT, -1)
        self.fused_steps = 0
        if self.can_fuse:
            self.buffers["decode_exchange"][decode_step.TOLD_WORDS].view(torch.int64).fill_(self.told.data_ptr())
        self.buffers["attention_partials"].zero_()
        self.buffers["sample_counters"].zero_()
        self.buffers["row_words"].zero_()
        self.model = Llama(config, weights, self.buffers, self.kv_cache, self.block_table)
        self.params = SamplingState(self.buffers["sampling_params"], self.buffers["token_counts"])
        state = self.buffers["decode_state"].zero_()[:, : limits.max_num_seqs]
        self.decode_rows, self.next_positions, self.token_ids, self.context_lens, self.last_tokens, self.sampled = state
        self.stream = torch.cuda.Stream(self.device) if self.cuda else None
        if self.stream:  # weights and buffers were filled on the current stream
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.graphs = StepGraphs(CudaCapture(self.stream)) if self.stream and graphs else None
        self.decoding: Int32Array | None = None  # rows of the last step, if its decode state was on the device
        size = self.buffers["step_inputs"].size(0)
        self.uploads = [_host(size, self.cuda) for _ in range(IN_FLIGHT)]
        self.downloads = [_host(limits.max_num_seqs, self.cuda) for _ in range(IN_FLIGHT)]
        self.logprob_downloads: list[tuple[Tensor, Tensor]] = []  # ids and values for each slot, once someone asks
        self.last_logprobs: StepLogprobs | None = None
        self.events = [torch.cuda.Event() for _ in range(IN_FLIGHT)] if self.cuda else []
        self.pending: deque[tuple[int, Tensor, float]] = deque()  # slot, tokens on the host, time of launch
        self.launched = 0

    def launch(self, plan: StepPlan) -> None:
        """Starts one step; its tokens are had from `collect`, in the order of launches."""
        if len(self.pending) == IN_FLIGHT:
            raise RuntimeError(f"{IN_FLIGHT} steps are in flight; collect one before launching another")
        slot = self.launched % IN_FLIGHT
        self.launched += 1
        with torch.inference_mode(), self._on_stream():
            self._update_table(plan)
            step = self._decode_step if self.graphs and plan.is_decode_only and not self.hook else self._step
            sampled = step(plan, slot)
            if sampled.device == self.device:
                sampled = self.downloads[slot][: sampled.size(0)].copy_(sampled, non_blocking=True)
            if plan.wants_logprobs:
                self._download_logprobs(slot, sampled.size(0))
            if self.cuda:
                self.events[slot].record()
        self.pending.append((slot, sampled, time.monotonic()))

    def collect(self) -> Int32Array:
        """Waits for the oldest launched step; its tokens, int32 [R], in the order of `sample_seqs`, -1 for none."""
        slot, sampled, launched = self.pending.popleft()
        if self.cuda:
            self.events[slot].synchronize()
            if time.monotonic() - launched > SUSPICIOUS_SECONDS:
                self._check_decode_step()
        tokens: Int32Array = sampled.numpy().copy()
        if self.logprob_downloads:
            ids, values = self.logprob_downloads[slot]
            self.last_logprobs = StepLogprobs(ids[: len(tokens)].numpy(), values[: len(tokens)].numpy())
        return tokens

    def logprobs(self) -> StepLogprobs:
        """Of the step last collected, whose plan asked for them; valid until another step is launched."""
        assert self.last_logprobs is not None
        return self.last_logprobs

    def _check_decode_step(self) -> None:
        error = decode_step.describe_error(self.buffers["decode_exchange"][decode_step.ERROR_WORDS].tolist())
        if error:
            raise UserError(
                f"the decode kernel gave up: parts of it waited in vain for others ({error})",
                fix="It needs all of the GPU at once: stop other programs on it.",
            )

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

    def _update_table(self, plan: StepPlan) -> None:
        """Applies what the plan says has changed in the block table."""
        if count := len(plan.block_updates):
            row, column, block = plan.block_updates.T
            both = np.empty(3 * count, dtype=np.int32)  # indices as int64, then blocks: one transfer
            both[: 2 * count].view(np.int64)[:] = row.astype(np.int64) * self.block_table.size(1) + column
            both[2 * count :] = block
            index, blocks = self._to_device(torch.from_numpy(both)).tensor_split([2 * count])
            self.block_table.view(-1).index_copy_(0, index.view(torch.int64), blocks)

    def _update_rows(self, plan: StepPlan) -> None:
        """Takes parameters and tokens of rows with new owners; before sampling, and the later the more is under way."""
        if plan.row_updates:
            self.params.update(plan.row_updates)
        if plan.histories:
            self.params.remember(plan.histories)

    def _to_device(self, tensor: Tensor) -> Tensor:
        # From pageable memory CUDA stages the bytes before it returns: the source may be reused at once.
        return tensor.to(self.device, non_blocking=True)

    def _upload(self, slot: int, arrays: list[tuple[Int32Array, int, int]]) -> list[Tensor]:
        """Copies int32 arrays to the device in one transfer, each padded to a length with a value.

        Returns their views there, which lie where the lengths say: a graph finds them again.
        """
        host, target = self.uploads[slot], self.buffers["step_inputs"]
        staging = host.numpy()
        views, offset = [], 0
        for array, length, padding in arrays:
            staging[offset : offset + len(array)] = array
            staging[offset + len(array) : offset + length] = padding
            views.append(target[offset : offset + length])
            offset += -(-length // ALIGN) * ALIGN
        target[:offset].copy_(host[:offset], non_blocking=True)
        return views

    def _step(self, plan: StepPlan, slot: int) -> Tensor:
        """A step whose inputs come from the host; if it is not large, padded. By a graph when its size comes again.

        What attention_decode reads early is right in a graph (see launch.h): nothing starts in a graph before all that
        was put into the stream ahead of it has ended. That is the upload of the block table, and every step that stored
        K and V of a decoding row's earlier positions; this step stores at other places.
        """
        self.decoding = None
        n, exact = plan.num_decodes, step_size(plan)
        chunk_slots = np.concatenate((np.full(n, -1, np.int32), plan.slots[n:]))
        padded = padded_size(exact, self.limits) if self.graphs and not self.hook else None
        tokens, decodes, chunks, longest = size = padded or exact
        samples = len(plan.sample_seqs)
        token_ids, positions, slots, rows, context_lens, *chunk_inputs, sample_tokens, sample_rows, sample_positions = (
            self._upload(
                slot,
                [
                    (plan.token_ids, tokens, 0),
                    (plan.positions, tokens, 0),
                    (chunk_slots, tokens, -1),
                    (plan.rows[:n], decodes, -1),
                    (plan.context_lens[:n], decodes, 0),
                    (plan.rows[n:], chunks, -1),
                    (plan.context_lens[n:], chunks, 0),
                    (plan.query_start[n:], chunks + 1, plan.num_tokens),
                    (plan.sample_tokens, samples, 0),
                    (plan.rows[plan.sample_seqs], samples, 0),
                    (plan.sample_positions, samples, 0),
                ],
            )
        )
        if n:
            torch.index_select(self.last_tokens, 0, rows[:n], out=token_ids[:n])
        batch = Batch(token_ids, rows, context_lens)
        if chunks:
            chunk_rows, chunk_lens, query_start = chunk_inputs
            batch.chunks = Chunks(positions, slots, chunk_rows, chunk_lens, query_start, longest)
            batch.sample_tokens = sample_tokens
        share = decode_share(decodes, self.config.num_kv_heads, plan.context_lens[:n])
        if self.graphs and not self.hook and (padded or not n):
            self.graphs.run((size, share), lambda: self.model.trunk(batch, share))
        else:
            self.model.trunk(batch, share, self.hook)
        self._update_rows(plan)
        # How many rows are sampled changes from step to step: their logits and all behind them are launched one by one.
        sampled = self.sampled[:samples]
        if samples:
            logits = self.model.logits(batch, self.hook)
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

    def _decode_step(self, plan: StepPlan, slot: int) -> Tensor:
        """A step of decodes only, by its graph; nothing is uploaded while the same rows go on decoding."""
        assert self.graphs is not None
        self._update_rows(plan)
        bucket, num_seqs = decode_bucket(plan.num_seqs, self.limits), plan.num_seqs
        if self.decoding is not plan.rows:  # the scheduler keeps the array while the same rows go on
            rows, positions = self._upload(slot, [(plan.rows, bucket, -1), (plan.positions, bucket, -1)])
            self.decode_rows[:bucket].copy_(rows)
            self.next_positions[:bucket].copy_(positions)
            self.decoding = plan.rows
        penalties = self.params.any_penalties(plan.rows)
        longest = FUSED_CONTEXTS.get(bucket, 0) if self.can_fuse else 0
        fused = longest > 0 and int(plan.context_lens.max()) <= longest
        needs_logits = penalties or (plan.wants_logprobs and not fused)
        suits = fused or gemm.suits_argmax(self.buffers["normed"][:bucket])
        inside = suits and not needs_logits and self.params.all_plain(plan.rows, may_draw=fused)
        share = None if fused else decode_share(bucket, self.config.num_kv_heads, plan.context_lens)
        self.graphs.run((bucket, penalties, inside, share), lambda: self._decode(bucket, penalties, inside, share))
        if plan.wants_logprobs:  # outside of the graph, from the logits that it has left behind
            self._logprobs(self.sampled[:num_seqs], self.buffers["logits"][:num_seqs], self.decode_rows[:num_seqs])
        if not fused:
            return self.sampled[:num_seqs]
        told = self.told[self.fused_steps % IN_FLIGHT] if inside else self.sampled
        self.fused_steps += 1
        return told[:num_seqs]

    def _decode(self, bucket: int, penalties: bool, inside: bool, share: DecodeShare | None) -> None:
        """By `decode_step` if `share` is None; inside: it, or else the last product, finds the tokens by itself."""
        rows, context_lens = self.decode_rows[:bucket], self.context_lens[:bucket]
        next_positions, sampled = self.next_positions[:bucket], self.sampled[:bucket]
        if share is None:
            state = {"rows": rows, "context_lens": context_lens, "next_positions": next_positions, "sampled": sampled}
            logits = self.model.decode(state | {"last_tokens": self.last_tokens}, self.params if inside else None)
        else:
            token_ids = self.token_ids[:bucket]
            ops.decode_inputs(token_ids, context_lens, next_positions, self.last_tokens, rows)
            batch = Batch(token_ids, rows, context_lens)
            self.model.trunk(batch, share)
            if inside:
                self.model.greedy_tokens(sampled, self.last_tokens, rows)
            else:
                logits = self.model.logits(batch)
        if not inside:
            self._sample(sampled, logits, rows, context_lens, penalties)


def _view(arena: Tensor, offset: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    nbytes = ITEMSIZE[dtype] * int(np.prod(shape))
    return arena[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)


def _host(size: int, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.int32, pin_memory=pinned)
