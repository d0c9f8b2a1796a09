"""Every op again in plain torch with fp32 inside: the CPU backend, and the oracle of every GPU test.

Signatures and shapes as in `ops.py`. Importing this module registers the functions for the CPU dispatch key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tinyvllm_cli import ops
from tinyvllm_cli.reference_products import (  # noqa: F401 - registered at the end
    add_linear_hopper,
    add_linear_wide,
    argmax_linear_hopper,
    gated_linear_hopper,
    gated_linear_wide,
    linear_hopper,
    linear_wide,
    matvec,
    take_best,
)

GROUP_TOKENS = 512
"""Decode attention reads the cached context in groups of so many tokens."""


def embedding(out: Tensor, weight: Tensor, token_ids: Tensor) -> None:
    known = (token_ids >= 0) & (token_ids < weight.size(0))
    torch.index_select(weight, 0, torch.where(known, token_ids, 0), out=out)
    if not bool(known.all()):
        out[~known] = 0


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    x = x.float()
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1 / x.size(-1)).add_(eps).rsqrt_()
    torch.mul(x * scale, weight, out=out)


def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    residual.add_(x)
    rms_norm(out, residual, weight, eps)


def rope_store(qkv: Tensor, kv_cache: Tensor, rope_table: Tensor, positions: Tensor, slots: Tensor) -> None:
    if int(slots.min()) < 0:
        stored = (slots >= 0).nonzero().squeeze(1)
        if len(stored):
            some = qkv[stored]
            rope_store(some, kv_cache, rope_table, positions[stored], slots[stored])
            qkv[stored] = some
        return
    block_size, head_dim = kv_cache.shape[3:]
    heads = qkv.view(qkv.size(0), -1, head_dim)
    _rotate_and_store(heads, kv_cache, rope_table, positions, slots // block_size, slots % block_size)


def _rotate_and_store(
    heads: Tensor, kv_cache: Tensor, rope_table: Tensor, positions: Tensor, blocks: Tensor, offsets: Tensor
) -> None:
    """heads [T, Q + 2K, D]: those of q and k are rotated in place, k and v stored at offsets in blocks of the cache."""
    num_kv_heads = kv_cache.size(1)
    first, second = heads[:, :-num_kv_heads].chunk(2, dim=-1)  # of q and k
    cos, sin = rope_table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    a, b = first.float(), second.float()
    turned = (a * cos).addcmul_(b, sin, value=-1)
    second.copy_((b * cos).addcmul_(a, sin))
    first.copy_(turned)
    key_value = heads[:, -2 * num_kv_heads :].unflatten(1, (2, num_kv_heads)).transpose(1, 2)
    kv_cache.permute(0, 3, 1, 2, 4)[blocks, offsets] = key_value


def silu_mul(out: Tensor, gate_up: Tensor) -> None:
    gate, up = gate_up.float().chunk(2, dim=-1)
    torch.mul(functional.silu(gate), up, out=out)


linear = ops.linear


def add_linear_norm(
    out: Tensor, residual: Tensor, projection: Tensor, x: Tensor, weight: Tensor, norm: Tensor, eps: float,
    sums: object = None, *, complete: bool = True,
) -> None:  # fmt: skip
    linear(projection, x, weight)
    add_rms_norm(out, residual, projection, norm, eps)


def gated_linear(out: Tensor, gate_up: Tensor, x: Tensor, weight: Tensor, scale: object = None) -> None:
    linear(gate_up, x, weight)
    silu_mul(out, gate_up)


def decode_inputs(
    token_ids: Tensor, context_lens: Tensor, next_positions: Tensor, last_tokens: Tensor, rows: Tensor
) -> None:
    real = rows >= 0
    token_ids.copy_(torch.where(real, last_tokens[torch.where(real, rows, 0)], 0))
    next_positions.add_(real.int())
    context_lens.copy_(torch.where(real, next_positions, 0))


def decode_step(
    logits: Tensor, sampled: Tensor, last_tokens: Tensor, next_positions: Tensor, context_lens: Tensor,
    kv_cache: Tensor, workspace: Tensor, embed: Tensor, layers: list[Tensor], final_norm: Tensor, lm_head: Tensor,
    rope_table: Tensor, rows: Tensor, block_table: Tensor, temperature: Tensor | None, seeds: Tensor | None, eps: float,
    scale: float, num_stages: int = -1, times: Tensor | None = None,
) -> None:  # fmt: skip
    token_ids = torch.empty_like(rows)
    decode_inputs(token_ids, context_lens, next_positions, last_tokens, rows)
    parts = rows.new_empty(len(rows), 8)
    decode_parts(parts, rows, context_lens, 0, 0, 0, 1, 1)
    hidden = embed.new_empty(rows.size(0), embed.size(1))
    embedding(hidden, embed, token_ids)
    for i in range(len(layers) // 6):
        attn_norm, qkv_weight, o_weight, mlp_norm, gate_up_weight, down_weight = layers[6 * i : 6 * i + 6]
        qkv = _linear(_normed(hidden, attn_norm, eps), qkv_weight)
        attention = qkv.new_empty(len(rows), o_weight.size(1))
        attention_decode(attention, qkv, kv_cache[i], rope_table, block_table, parts, workspace, 1, 1, scale)
        hidden.add_(_linear(attention, o_weight))
        gate_up = _linear(_normed(hidden, mlp_norm, eps), gate_up_weight)
        activation = gate_up.new_empty(gate_up.size(0), gate_up.size(1) // 2)
        silu_mul(activation, gate_up)
        hidden.add_(_linear(activation, down_weight))
    matvec(logits, _normed(hidden, final_norm, eps), lm_head)
    if temperature is not None and seeds is not None:
        none, scratch = torch.zeros_like(temperature), (workspace, workspace)
        sample(sampled, last_tokens, logits, rows, context_lens, temperature, none, none + 1, none, seeds, *scratch)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    rms_norm(out, x, weight, eps)
    return out


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    out = x.new_empty(x.size(0), weight.size(0))
    matvec(out, x, weight)
    return out


def decode_parts(
    parts: Tensor, rows: Tensor, context_lens: Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
    num_splits: int, min_warps: int,
) -> None:  # fmt: skip
    torch.stack((rows, context_lens), dim=1, out=parts[: len(rows), 1:3])


def attention_decode(
    out: Tensor, qkv: Tensor, kv_cache: Tensor, rope_table: Tensor, block_table: Tensor, parts: Tensor,
    workspace: Tensor, num_splits: int, min_warps: int, scale: float,
) -> None:  # fmt: skip
    rows, context_lens = parts[: len(out), 1:3].unbind(1)
    lengths = context_lens.tolist()
    if 0 in lengths:
        out.zero_()
        real = context_lens.nonzero().squeeze(1)
        if len(real):
            some, inputs = out[real], (qkv[real], kv_cache, rope_table, block_table, parts[real])
            attention_decode(some, *inputs, workspace, num_splits, min_warps, scale)
            out[real] = some
        return
    num_kv_heads, _, block_size, head_dim = kv_cache.shape[1:]
    heads = qkv.view(qkv.size(0), -1, head_dim).clone()
    positions = context_lens - 1
    blocks = block_table[rows, positions // block_size]
    _rotate_and_store(heads, kv_cache, rope_table, positions, blocks, positions % block_size)
    queries = (heads[:, : -2 * num_kv_heads].float() * scale).unflatten(1, (num_kv_heads, -1))
    outs = out.unflatten(-1, (num_kv_heads, -1, head_dim))
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        outs[i] = _attend(queries[i], kv_cache, block_table[row], length)


def attention_prefill(
    out: Tensor, q: Tensor, kv_cache: Tensor, block_table: Tensor, rows: Tensor, query_start: Tensor,
    context_lens: Tensor, max_query_len: int, scale: float,
) -> None:  # fmt: skip
    num_heads = q.size(1) // kv_cache.size(4)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for s, row in enumerate(rows.tolist()):
        length, context = starts[s + 1] - starts[s], contexts[s]
        if length == 0:
            continue
        queries = slice(starts[s], starts[s + 1])
        by_head = q[queries].float().unflatten(1, (num_heads, -1)).transpose(0, 1)
        key, value = _read_cache(kv_cache, block_table[row], 0, context).unsqueeze(1)
        whole = length == context
        seen = None if whole else torch.arange(context) <= torch.arange(context - length, context).unsqueeze(1)
        result = functional.scaled_dot_product_attention(
            by_head.unsqueeze(0), key, value, seen, is_causal=whole, scale=scale, enable_gqa=True
        )
        out[queries] = result[0].transpose(0, 1).flatten(1)


def _read_cache(kv_cache: Tensor, blocks: Tensor, start: int, end: int) -> Tensor:
    """K and V of positions start, at the beginning of a block, to end of a sequence: fp32 [2, K, end - start, D]."""
    block_size = kv_cache.size(3)
    by_block = kv_cache.permute(2, 1, 0, 3, 4)  # K or V, K, B, block_size, D
    cached = by_block.index_select(2, blocks[start // block_size : -(-end // block_size)])
    return cached.float().flatten(2, 3)[:, :, : end - start]


def _attend(query: Tensor, kv_cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Attention of the last query of one sequence, online over groups of blocks.

    Each group gives softmax(q k) v and the logarithm of its sum, and they are merged by these (Flash-Decoding). query
    [K, G, D], scaled: the query heads of each KV head; blocks int32 [*] of a sequence of `length` tokens. Returns [K,
    G, D], fp32.
    """
    result, log_sum = None, None
    group = max(GROUP_TOKENS // kv_cache.size(3), 1) * kv_cache.size(3)
    for start in range(0, length, group):
        key, value = _read_cache(kv_cache, blocks, start, min(start + group, length))
        scores = torch.bmm(query, key.transpose(1, 2))
        part = torch.bmm(scores.softmax(dim=-1), value)
        if length > group:
            part_log_sum = scores.logsumexp(dim=-1, keepdim=True)
            if result is not None and log_sum is not None:
                both = torch.logaddexp(log_sum, part_log_sum)
                part = result * torch.exp(log_sum - both) + part * torch.exp(part_log_sum - both)
                part_log_sum = both
            log_sum = part_log_sum
        result = part
    assert result is not None
    return result


def sample(
    sampled: Tensor, last_tokens: Tensor, logits: Tensor, rows: Tensor, positions: Tensor, temperature: Tensor,
    top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, workspace: Tensor, counters: Tensor,
) -> None:  # fmt: skip
    take_best(sampled, last_tokens, logits, rows)
    for i, (row, best) in enumerate(zip(rows.tolist(), sampled.tolist(), strict=True)):
        if best >= 0 and float(temperature[row]) > 0:
            probabilities = _kept_probabilities(
                logits[i].double() / float(temperature[row]), int(top_k[row]), float(top_p[row]), float(min_p[row])
            )
            cumulative = probabilities.cumsum(0)
            draw = uniform(int(seeds[row]), int(positions[i])) * cumulative[-1]
            sampled[i] = last_tokens[row] = torch.searchsorted(cumulative, draw, right=True)


def _kept_probabilities(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities [V] (not normalised) after top-k, then min-p, then top-p; ties with the last one kept are kept."""
    probabilities = torch.exp(scaled - scaled.max())
    if 0 < top_k < len(scaled):
        probabilities[probabilities < probabilities.topk(top_k).values[-1]] = 0
    if min_p > 0:
        probabilities[probabilities < min_p] = 0
    if top_p < 1:
        descending = probabilities.sort(descending=True).values
        before = descending.cumsum(0) - descending
        last_kept = int((before < top_p * probabilities.sum()).sum()) - 1
        probabilities[probabilities < descending[max(last_kept, 0)]] = 0
    return probabilities


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1): first word of Philox4x32-10 of key (seed low, seed high), counter (position, 0, 0, 0)."""
    mask = 0xFFFFFFFF
    key = [seed & mask, (seed >> 32) & mask]
    counter = [position & mask, 0, 0, 0]
    for _ in range(10):
        left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (right >> 32) ^ counter[1] ^ key[0],
            right & mask,
            (left >> 32) ^ counter[3] ^ key[1],
            left & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return (counter[0] + 0.5) / 2.0**32


def penalize(
    logits: Tensor, counts: Tensor, rows: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    for i, row in enumerate(rows.tolist()):
        penalties = (float(repetition[row]), float(presence[row]), float(frequency[row]))
        if row < 0 or penalties == (1, 0, 0):
            continue
        times = counts[row] // 2
        repeated = torch.where(logits[i] > 0, logits[i] / penalties[0], logits[i] * penalties[0])
        subtracted = torch.where(times > 0, penalties[1] + penalties[2] * times, 0)
        logits[i] = torch.where(counts[row] > 0, repeated - subtracted, logits[i])


def count_tokens(counts: Tensor, sampled: Tensor, rows: Tensor) -> None:
    real = (rows >= 0) & (sampled >= 0)
    counts[rows[real], sampled[real]] += 2


def logprobs(
    values: Tensor, token_ids: Tensor, logits: Tensor, sampled: Tensor, rows: Tensor, num_logprobs: Tensor
) -> None:
    for i, row in enumerate(rows.tolist()):
        asked = int(num_logprobs[row]) if row >= 0 else -1
        if asked < 0:
            continue
        known = functional.log_softmax(logits[i], dim=-1)
        best = known.sort(descending=True, stable=True)
        count = min(asked, len(known))
        token_ids[i, 0], values[i, 0] = sampled[i], known[sampled[i]] if sampled[i] >= 0 else -torch.inf
        token_ids[i, 1 : asked + 1], values[i, 1 : asked + 1] = -1, -torch.inf
        token_ids[i, 1 : count + 1] = best.indices[:count]
        values[i, 1 : count + 1] = best.values[:count]


_library = torch.library.Library("tinyvllm", "IMPL", "CPU")
for _name in ops.SCHEMAS:
    _library.impl(_name, globals()[_name])
