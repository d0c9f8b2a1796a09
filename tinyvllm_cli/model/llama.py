"""The Llama forward pass over flat tokens and a paged KV cache (Touvron et al. 2023; Llama 3 herd of models, 2024).

Written as the paper has it: a residual stream, to which attention and a gated MLP each add, both behind an RMSNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinyvllm_cli import gemm, ops, reference

if TYPE_CHECKING:
    from tinyvllm_cli.checkpoint.config import ModelConfig
    from tinyvllm_cli.checkpoint.weights import Weights
    from tinyvllm_cli.model.decode_share import DecodeShare
    from tinyvllm_cli.model.sampling import SamplingState

StageHook = Callable[[str, int], None]
"""Called after each stage with its name (`memory.plan.STAGES`) and layer, -1 outside the layers: tests and profiles. An
op that is several stages counts as the last of them."""


@dataclass(slots=True)
class Chunks:
    """The device tensors of C chunks of prefill in a step of T tokens; all int32.

    positions, slots [T], of decodes too, whose slot is -1; rows, context lengths [C]; query_start [C + 1], where the
    tokens of each chunk begin; max_query_len is at least the longest chunk.
    """

    positions: Tensor
    slots: Tensor
    rows: Tensor
    lens: Tensor
    query_start: Tensor
    max_query_len: int


@dataclass(slots=True)
class Batch:
    """The device tensors of one step: T tokens of D sequences that decode, then of chunks of prefill; all int32.

    token_ids [T]; rows and context lengths of decodes [D]; sample_tokens [R] indexes the tokens whose logits are
    wanted, None when they are all of them. All but sample_tokens may be padded: tokens have slot -1 then, no chunk has
    them, and decodes have row -1 and length 0; what comes of them is unspecified. Chunks may take the place of padded
    decodes.
    """

    token_ids: Tensor
    decode_rows: Tensor
    decode_lens: Tensor
    chunks: Chunks | None = None
    sample_tokens: Tensor | None = None


class Llama:
    """A Llama over preallocated buffers: `buffers` by the names of `memory.plan`, `kv_cache` [L, B, K, 2, block, D]."""

    def __init__(
        self, config: ModelConfig, weights: Weights, buffers: dict[str, Tensor], kv_cache: Tensor, block_table: Tensor
    ) -> None:
        self.config = config
        self.weights = weights
        self.buffers = buffers
        self.kv_cache = kv_cache
        self.block_table = block_table
        self.scale = config.head_dim**-0.5
        # On the CPU the dispatcher would lead to the same functions, but takes 1.2 of a small model's 30 ms a step.
        self.ops = reference if weights.embed.device.type == "cpu" else ops

    def forward(self, batch: Batch, share: DecodeShare, hook: StageHook | None = None) -> Tensor:
        """Runs one step: stores K and V of every token and returns the fp32 logits [R, V] of the sampled ones."""
        self.trunk(batch, share, hook)
        return self.logits(batch, hook)

    def trunk(self, batch: Batch, share: DecodeShare, hook: StageHook | None = None) -> None:
        """All layers and the last norm: stores K and V of every token, and leaves what `logits` needs."""
        c, w, b = self.config, self.weights, self.buffers
        done: StageHook = hook or (lambda stage, layer: None)
        num_tokens = batch.token_ids.size(0)
        hidden, normed, qkv = b["hidden"][:num_tokens], b["normed"][:num_tokens], b["qkv"][:num_tokens]
        attention, projection = b["attention"][:num_tokens], b["projection"][:num_tokens]
        gate_up, activation = b["gate_up"][:num_tokens], b["activation"][:num_tokens]

        if batch.decode_rows.size(0):
            sizes = (c.num_heads, c.num_kv_heads, c.head_dim, *share)
            self.ops.decode_parts(b["attention_parts"], batch.decode_rows, batch.decode_lens, *sizes)
        self.ops.embedding(hidden, w.embed, batch.token_ids)
        done("embedding", -1)
        first = w.layers[0]
        self.ops.rms_norm(normed, hidden, first.attn_norm, c.rms_norm_eps)
        done("attn_norm", 0)
        wait = hook is None and gemm.norms_can_wait(normed, first.qkv, first.o, first.gate_up, first.down)
        sums, scale = b["row_words"][1:].unbind() if wait else None, None
        for i, layer in enumerate(w.layers):
            self.ops.linear(qkv, normed, layer.qkv, scale)
            done("qkv", i)
            self.attend(attention, qkv, self.kv_cache[i], batch, share)
            done("attention", i)
            add = (normed, hidden, projection, attention, layer.o, layer.mlp_norm, c.rms_norm_eps)
            scale = self.ops.add_linear_norm(*add, sums, complete=False)
            done("mlp_norm", i)
            self.ops.gated_linear(activation, gate_up, normed, layer.gate_up, scale)
            done("silu_mul", i)
            last = i == len(w.layers) - 1
            norm = w.final_norm if last else w.layers[i + 1].attn_norm
            add = (normed, hidden, projection, activation, layer.down, norm, c.rms_norm_eps)
            scale = self.ops.add_linear_norm(*add, sums and sums[::-1], complete=last)
            done(*(("final_norm", -1) if last else ("attn_norm", i + 1)))

    def logits(self, batch: Batch, hook: StageHook | None = None) -> Tensor:
        """The fp32 logits [R, V] of the sampled tokens, behind `trunk` of the same batch."""
        b = self.buffers
        rows = b["normed"][: batch.token_ids.size(0)]
        if batch.sample_tokens is not None:
            rows = torch.index_select(
                rows, 0, batch.sample_tokens, out=b["sample_hidden"][: batch.sample_tokens.size(0)]
            )
        logits = b["logits"][: rows.size(0)]
        self.ops.linear(logits, rows, self.weights.lm_head)
        if hook:
            hook("logits", -1)
        return logits

    def greedy_tokens(self, sampled: Tensor, last_tokens: Tensor, rows: Tensor) -> None:
        """Samples at temperature 0 behind `trunk`, which had one token of each of `rows`; leaves no logits."""
        b = self.buffers
        x = b["normed"][: rows.size(0)]
        ops.argmax_linear_hopper(sampled, last_tokens, b["row_words"][0], x, self.weights.lm_head, rows)

    def decode(self, state: dict[str, Tensor], params: SamplingState | None) -> Tensor:
        """A step of a few sequences by the one op `decode_step`: their logits [S, V].

        state: `sampled`, `last_tokens`, `next_positions`, `context_lens` and `rows`, as the op has them; with the
        parameters of all rows it samples too.
        """
        w, b = self.weights, self.buffers
        logits = b["logits"][: state["rows"].size(0)]
        ops.decode_step(
            logits,
            state["sampled"],
            state["last_tokens"],
            state["next_positions"],
            state["context_lens"],
            self.kv_cache,
            b["decode_exchange"],
            w.embed,
            [t for x in w.layers for t in (x.attn_norm, x.qkv, x.o, x.mlp_norm, x.gate_up, x.down)],
            w.final_norm,
            w.lm_head,
            b["rope_table"],
            state["rows"],
            self.block_table,
            params.temperature if params else None,
            params.seeds if params else None,
            self.config.rms_norm_eps,
            self.scale,
        )
        return logits

    def attend(self, out: Tensor, qkv: Tensor, kv_cache: Tensor, batch: Batch, share: DecodeShare) -> None:
        """RoPE, all K and V stored, then attention; what chunks write comes last, also over zeros of padded decodes."""
        n, chunks, rope_table = batch.decode_rows.size(0), batch.chunks, self.buffers["rope_table"]
        if chunks:
            self.ops.rope_store(qkv, kv_cache, rope_table, chunks.positions, chunks.slots)
        if n:
            self.ops.attention_decode(
                out[:n],
                qkv[:n],
                kv_cache,
                rope_table,
                self.block_table,
                self.buffers["attention_parts"],
                self.buffers["attention_partials"],
                *share,
                self.scale,
            )
        if chunks:
            self.ops.attention_prefill(
                out,
                qkv[:, : self.config.num_heads * self.config.head_dim],
                kv_cache,
                self.block_table,
                chunks.rows,
                chunks.query_start,
                chunks.lens,
                chunks.max_query_len,
                self.scale,
            )
