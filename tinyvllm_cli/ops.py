"""The op table: one schema and one Python function per operation, and the only user of `torch.ops.tinyvllm`.

The dispatcher picks the implementation by device: `reference.py` on the CPU, the launchers of `cuda_ext/` on CUDA once
the extension is loaded. A CUDA tensor without the extension raises; nothing falls back silently. Every op writes into
tensors that the caller owns, so that a captured CUDA graph finds them again. Letters in shapes: T tokens, S sequences,
R sampled rows, H hidden size, I intermediate size, V vocabulary, D head_dim, Q query heads, K key/value heads, N out
features, B blocks. Index tensors are int32 and use -1 for padding. A failed check raises RuntimeError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinyvllm_cli import gemm
from tinyvllm_cli.schemas import SCHEMAS

_library = torch.library.Library("tinyvllm", "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema)
_ops = torch.ops.tinyvllm
_UNSCALED = (None, 0.0)


def embedding(out: Tensor, weight: Tensor, token_ids: Tensor) -> None:
    """out[t] = weight[token_ids[t]]. out [T, H], weight [V, H], token_ids int32 [T]; an id outside 0..V-1 gives
    zeros."""
    _ops.embedding(out, weight, token_ids)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight by rows, fp32 inside. out, x [T, H], weight [H] (Zhang, Sennrich
    2019)."""
    _ops.rms_norm(out, x, weight, eps)


def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """residual += x, rounded to its dtype; out = rms_norm(residual). out, residual, x [T, H], weight [H]."""
    _ops.add_rms_norm(out, residual, x, weight, eps)


def rope_store(qkv: Tensor, kv_cache: Tensor, rope_table: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Rotates q in place inside qkv and writes rotated k, and v, into their cache slots (RoFormer, Su et al. 2021).

    qkv [T, (Q + 2K) * D]: q heads, k heads, v heads; the k and v parts of qkv are unspecified afterwards. kv_cache [B,
    K, 2, block_size, D]; rope_table fp32 [max_position, D], cosines then sines; the rotation pairs elements i and i +
    D/2 (Hugging Face layout). positions, slots int32 [T]; a token with slot -1 is left alone.
    """
    _ops.rope_store(qkv, kv_cache, rope_table, positions, slots)


def silu_mul(out: Tensor, gate_up: Tensor) -> None:
    """out = silu(gate) * up, fp32 inside. out [T, I], gate_up [T, 2I]: gate, then up (SwiGLU, Shazeer 2020)."""
    _ops.silu_mul(out, gate_up)


def matvec(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """out = x @ weight.T for 1 to `gemm.MATVEC_MAX_ROWS` rows, fp32 inside. Shapes and dtypes as in `linear`."""
    _ops.matvec(out, x, weight)


class RowScale(NamedTuple):
    """What `add_linear_norm` has left undone: row t of x is still to be divided by its root mean square.

    sums int64, at least T: of the squares of row t of the residual, in units of 2^-28; eps is added to their mean.
    """

    sums: Tensor
    eps: float


def linear_hopper(out: Tensor, x: Tensor, weight: Tensor, scale: RowScale | None = None) -> None:
    """`matvec` for up to `gemm.HOPPER_MAX_ROWS` rows on compute capability 9.0; the scale is applied to its result."""
    _ops.linear_hopper(out, x, weight, *(scale or _UNSCALED))


def add_linear_hopper(
    residual: Tensor, scaled: Tensor | None, sums: Tensor | None, other_sums: Tensor | None, x: Tensor, weight: Tensor,
    norm: Tensor | None,
) -> None:  # fmt: skip
    """residual += x @ weight.T, fp32 inside and rounded once, for as many rows as `linear_hopper` takes.

    x [T, in], weight [H, in], residual [T, H]; in and H are multiples of 8. With the weights `norm` [H] of the norm
    behind it: scaled [T, H] = residual * norm, and the squares of residual's rows are added to `sums`, see `RowScale`.
    other_sums int64, at least T, becomes zero: two arrays, zero at first, serve a chain of products in turn.
    """
    _ops.add_linear_hopper(residual, scaled, sums, other_sums, x, weight, norm)


def gated_linear_hopper(out: Tensor, x: Tensor, weight: Tensor, scale: RowScale | None = None) -> None:
    """out = silu(gate) * up, gate and up = x @ weight.T, all fp32 inside, where `linear_hopper` works.

    x [T, in], weight [2I, in]: gate rows, then up rows; out [T, I] of x's dtype; I is a multiple of 8.
    """
    _ops.gated_linear_hopper(out, x, weight, *(scale or _UNSCALED))


def gated_linear_wide(out: Tensor, x: Tensor, weight: Tensor, scale: RowScale | None = None) -> None:
    """`gated_linear_hopper` for many tokens, bound by the tensor cores, on compute capability 9.0.

    I and in are multiples of 8.
    """
    _ops.gated_linear_wide(out, x, weight, *(scale or _UNSCALED))


def linear_wide(out: Tensor, x: Tensor, weight: Tensor, scale: RowScale | None = None) -> None:
    """out = x @ weight.T, made for 129 to 256 rows and few features, on compute capability 9.0.

    x [T, in], weight [N, in], out [T, N] of x's dtype; in and N are multiples of 8.
    """
    _ops.linear_wide(out, x, weight, *(scale or _UNSCALED))


def add_linear_wide(
    residual: Tensor, scaled: Tensor | None, sums: Tensor | None, other_sums: Tensor | None, x: Tensor, weight: Tensor,
    norm: Tensor | None,
) -> None:  # fmt: skip
    """`add_linear_hopper` for any number of rows, made for 129 to 256."""
    _ops.add_linear_wide(residual, scaled, sums, other_sums, x, weight, norm)


def argmax_linear_hopper(
    sampled: Tensor, last_tokens: Tensor, ranks: Tensor, x: Tensor, weight: Tensor, rows: Tensor
) -> None:
    """`sample` of `linear` at temperature 0 for up to `gemm.FEW_MAX_ROWS` rows, without storing the logits.

    x [S, in], weight [V, in]; sampled, rows int32 [S], row -1 is padding and gets -1; last_tokens int32 [max_num_seqs].
    ranks int64, at least S, are zero before and after; unused on the CPU.
    """
    _ops.argmax_linear_hopper(sampled, last_tokens, ranks, x, weight, rows)


def linear(out: Tensor, x: Tensor, weight: Tensor, scale: RowScale | None = None) -> None:
    """out = x @ weight.T. x [T, in], weight [N, in], out [T, N] of x's dtype, or fp32 (logits).

    A scale of x's rows only where `gemm.norms_can_wait`.
    """
    if x.device.type == "cuda" and x.size(0) <= gemm.MATVEC_MAX_ROWS:
        matvec(out, x, weight)
    elif gemm.suits_hopper(x):
        linear_hopper(out, x, weight, scale)
    elif gemm.suits_linear_wide(x, weight) and out.dtype == x.dtype:
        linear_wide(out, x, weight, scale)
    elif out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    elif x.device.type == "cuda":
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
    else:
        torch.mm(x.to(out.dtype), weight.t().to(out.dtype), out=out)


def add_linear_norm(
    out: Tensor, residual: Tensor, projection: Tensor, x: Tensor, weight: Tensor, norm: Tensor, eps: float,
    sums: Sequence[Tensor] | None = None, *, complete: bool = True,
) -> RowScale | None:  # fmt: skip
    """residual += x @ weight.T, rounded to its dtype; out = rms_norm(residual) by the weights `norm` [H].

    x [T, in], weight [H, in], out and residual [T, H]; projection [T, H] is room for what lies between. sums, where
    `gemm.norms_can_wait`: two int64 arrays of at least T, the first one zero; the second one becomes zero. If then not
    complete, the rows of out are as the RowScale says that is returned, for the product behind.
    """
    if sums is not None:
        add = add_linear_hopper if gemm.suits_hopper(x) else add_linear_wide
        if not complete:
            add(residual, out, sums[0], sums[1], x, weight, norm)
            return RowScale(sums[0], eps)
        add(residual, None, None, sums[1], x, weight, None)
        rms_norm(out, residual, norm, eps)
    elif x.size(0) <= gemm.MATVEC_MAX_ROWS or gemm.suits_hopper(x):
        linear(projection, x, weight)
        add_rms_norm(out, residual, projection, norm, eps)
    elif gemm.suits_add_wide(x, weight):
        add_linear_wide(residual, None, None, None, x, weight, None)
        rms_norm(out, residual, norm, eps)
    else:  # cuBLAS adds to what is there, and rounds once
        residual.addmm_(x, weight.t())
        rms_norm(out, residual, norm, eps)
    return None


def gated_linear(out: Tensor, gate_up: Tensor, x: Tensor, weight: Tensor, scale: RowScale | None = None) -> None:
    """`silu_mul` of `linear`. x [T, in], weight [2I, in], out [T, I]; gate_up [T, 2I] is room for what lies between."""
    if gemm.suits_hopper(x):
        gated_linear_hopper(out, x, weight, scale)
    elif gemm.suits_wide(x, weight):
        gated_linear_wide(out, x, weight, scale)
    else:
        linear(gate_up, x, weight)
        silu_mul(out, gate_up)


def decode_inputs(
    token_ids: Tensor, context_lens: Tensor, next_positions: Tensor, last_tokens: Tensor, rows: Tensor
) -> None:
    """Makes the inputs of a decode step from the state on the device, and advances `next_positions`.

    For each i with row = rows[i]: token_ids[i] = last_tokens[row]; context_lens[i] = ++next_positions[i]. Padding (row
    -1) gives token 0 and context length 0. All int32; last_tokens [max_num_seqs], the others [S].
    """
    _ops.decode_inputs(token_ids, context_lens, next_positions, last_tokens, rows)


def decode_parts(
    parts: Tensor, rows: Tensor, context_lens: Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
    num_splits: int, min_warps: int,
) -> None:  # fmt: skip
    """Shares out the work of `attention_decode`: once for all layers, as contexts are the same in each.

    rows, context_lens int32 [S]; row -1 goes with context length 0. parts int32, at least [S * num_splits, 8]: each
    says which tiles of 16 tokens of which context it is (`decode_shape.cuh`), on the CPU only which context. Uneven
    contexts are split in num_splits - 1 parts on average, nearly equal ones in half as many or fewer; 1 splits none. At
    least min_warps warps attend to a part together, up to 8; by 1 it is the number of sequences that decides.
    """
    _ops.decode_parts(parts, rows, context_lens, num_heads, num_kv_heads, head_dim, num_splits, min_warps)


def attention_decode(
    out: Tensor, qkv: Tensor, kv_cache: Tensor, rope_table: Tensor, block_table: Tensor, parts: Tensor,
    workspace: Tensor, num_splits: int, min_warps: int, scale: float,
) -> None:  # fmt: skip
    """Attention of one token per sequence over its context (PagedAttention, Kwon et al. 2023), `rope_store` included.

    out [S, Q * D]; qkv [S, (Q + 2K) * D] as the linear gives it: q and k are rotated for a context's last position, and
    K and V stored there, while qkv stays as it is. kv_cache [B, K, 2, block_size, D]; rope_table as in `rope_store`;
    block_table int32 [max_num_seqs, *]. parts is what `decode_parts` made for the same sizes, num_splits and
    min_warps: their results are merged in a fixed order (Flash-Decoding); context length 0 gives a zero row and stores
    nothing.
    workspace fp32, at least 4 + S * Q * num_splits * (D + 4), is zero before and after. In a captured graph see
    `launch.h` for what its predecessors may write.
    """
    _ops.attention_decode(out, qkv, kv_cache, rope_table, block_table, parts, workspace, num_splits, min_warps, scale)


def attention_prefill(
    out: Tensor, q: Tensor, kv_cache: Tensor, block_table: Tensor, rows: Tensor, query_start: Tensor,
    context_lens: Tensor, max_query_len: int, scale: float,
) -> None:  # fmt: skip
    """Causal attention of chunks of queries over their cached context, history included (FlashAttention-2, Dao 2023).

    Sequence s owns query rows query_start[s] to query_start[s + 1] of q and out [T, Q * D]; its last query has position
    context_lens[s] - 1, and a query at position p attends to positions 0 to p. rows, context_lens int32 [S],
    query_start int32 [S + 1]; max_query_len is at least the longest chunk.
    """
    _ops.attention_prefill(out, q, kv_cache, block_table, rows, query_start, context_lens, max_query_len, scale)


def sample(
    sampled: Tensor, last_tokens: Tensor, logits: Tensor, rows: Tensor, positions: Tensor, temperature: Tensor,
    top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, workspace: Tensor, counters: Tensor,
) -> None:  # fmt: skip
    """Draws one token per row of logits: sampled[i] and last_tokens[rows[i]].

    logits fp32 [R, V]; rows, positions, sampled int32 [R]; temperature, top_p, min_p fp32, top_k int32 and seeds int64
    [max_num_seqs], all indexed by rows[i]. Temperature 0 takes the largest logit, the lowest index among equals. Else
    probabilities are softmax(logits / temperature), kept by top_k (0: all), then min_p (a share of the largest, 0:
    off), then top_p (the smallest set, by falling probability, that reaches top_p of what is left; 1: all), and the
    token is the first, in vocabulary order, whose cumulative kept probability exceeds u times their sum. u = (x + 0.5)
    / 2^32, x the first word of Philox4x32-10 (Salmon et al. 2011) with key = seed (low word, high word) and counter =
    (positions[i], 0, 0, 0): a draw depends on the row's seed and position only. Row -1 is padding and gets -1. So does
    a row with NaN or whose largest logit is infinite, and 0 as its last token, for the step that may be on its way.
    workspace and counters as in `launch.h`; unused on the CPU.
    """
    _ops.sample(
        sampled, last_tokens, logits, rows, positions, temperature, top_k, top_p, min_p, seeds, workspace, counters
    )


def penalize(
    logits: Tensor, counts: Tensor, rows: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Makes tokens that a sequence has already less probable (or more), in place, before `sample`.

    logits fp32 [R, V]; counts int32 [max_num_seqs, V] = 2 * times in the answer + (1 if in the prompt); repetition
    (Keskar et al. 2019), presence and frequency fp32 [max_num_seqs]; counts and penalties by rows[i], int32 [R], -1 is
    padding. Where the count is not 0, a positive logit is divided by repetition and another multiplied by it; where the
    token is in the answer, presence + frequency * times is then subtracted. 1, 0, 0 changes nothing.
    """
    _ops.penalize(logits, counts, rows, repetition, presence, frequency)


def count_tokens(counts: Tensor, sampled: Tensor, rows: Tensor) -> None:
    """counts[rows[i], sampled[i]] += 2, for `penalize`. sampled, rows int32 [R]; rows are distinct, -1 is padding."""
    _ops.count_tokens(counts, sampled, rows)


def logprobs(
    values: Tensor, token_ids: Tensor, logits: Tensor, sampled: Tensor, rows: Tensor, num_logprobs: Tensor
) -> None:
    """Log-probabilities under softmax(logits) of the sampled tokens and of the most probable ones.

    values fp32, token_ids int32 [R, W]: column 0 is sampled[i]; columns 1 to k = num_logprobs[rows[i]] (int32
    [max_num_seqs], at most W - 1) are the k most probable tokens, falling, of equal ones the lowest first; token -1 and
    -inf where the vocabulary has no more. Rows with k = -1 and padding (row -1), and columns beyond k, are unspecified.
    """
    _ops.logprobs(values, token_ids, logits, sampled, rows, num_logprobs)


def decode_step(
    logits: Tensor, sampled: Tensor, last_tokens: Tensor, next_positions: Tensor, context_lens: Tensor,
    kv_cache: Tensor, workspace: Tensor, embed: Tensor, layers: list[Tensor], final_norm: Tensor, lm_head: Tensor,
    rope_table: Tensor, rows: Tensor, block_table: Tensor, temperature: Tensor | None, seeds: Tensor | None, eps: float,
    scale: float, num_stages: int = -1, times: Tensor | None = None,
) -> None:  # fmt: skip
    """A whole decode step of at most `memory.decode_step.MAX_ROWS` sequences in one kernel.

    From the state that `decode_inputs` starts from, rows, next_positions [S] and last_tokens [max_num_seqs], which it
    advances in the same way: K and V of each row's last token go into kv_cache [layers, B, K, 2, block_size, D], logits
    fp32 [S, V] and context_lens [S] are written. With temperature fp32 and seeds int64 [max_num_seqs] it also writes
    sampled [S] and last_tokens, as `sample` without top-k, top-p and min-p. Row -1 is padding. layers: for each layer
    attn_norm, qkv, o, mlp_norm, gate_up, down.

    workspace int32, as `memory.decode_step` sizes it: HEADER_WORDS zeros, then -1, before the first call; afterwards
    its words 4 to 7 are zero, or tell where a wait between CTAs ended without success
    (`memory.decode_step.describe_error`); words 8 and 9 may say where on the host steps put their tokens
    (`memory.decode_step.TOLD_WORDS`).
    num_stages runs only the first stages (5 a layer: qkv, attention, o, gate_up, down; then logits), for tests. times
    int64 [SMs, stages, 2] gets, for each CTA and stage, the nanoseconds when its input was there and its output
    written. Needs compute capability 9 or 10; unsupported sizes raise. The CPU runs the single ops and ignores
    workspace, num_stages and times.
    """
    _ops.decode_step(
        logits, sampled, last_tokens, next_positions, context_lens, kv_cache, workspace, embed, layers, final_norm,
        lm_head, rope_table, rows, block_table, temperature, seeds, eps, scale, num_stages, times,
    )  # fmt: skip
