"""Every op again in plain torch with fp32 inside: the CPU backend, and the oracle of every GPU test.

Signatures and shapes as in `ops.py`. Importing this module registers the functions for the CPU dispatch key.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tinyvllm_cli import ops

GROUP_TOKENS = 512
"""Attention reads the cached context in groups of blocks of about so many tokens."""


def embedding(out: Tensor, weight: Tensor, token_ids: Tensor) -> None:
    known = (token_ids >= 0) & (token_ids < weight.size(0))
    torch.index_select(weight, 0, torch.where(known, token_ids, 0), out=out)
    if not bool(known.all()):
        out[~known] = 0


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps))


def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    residual.add_(x)
    rms_norm(out, residual, weight, eps)


def rope_store(qkv: Tensor, kv_cache: Tensor, rope_table: Tensor, positions: Tensor, slots: Tensor) -> None:
    _, num_kv_heads, _, block_size, head_dim = kv_cache.shape
    heads = qkv.view(qkv.size(0), -1, head_dim)
    rotated_heads = heads[:, : heads.size(1) - num_kv_heads]  # q and k
    cos, sin = rope_table[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = rotated_heads.float().chunk(2, dim=-1)
    rotated_heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    stored = (slots >= 0).nonzero().squeeze(1)
    slots = slots[stored]
    key_value = heads[stored, -2 * num_kv_heads :].view(-1, 2, num_kv_heads, head_dim).transpose(1, 2)
    kv_cache[slots // block_size, :, :, slots % block_size] = key_value


def silu_mul(out: Tensor, gate_up: Tensor) -> None:
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(functional.silu(gate).mul_(up))


def matvec(out: Tensor, x: Tensor, weight: Tensor) -> None:
    out.copy_(x.float() @ weight.float().t())


def decode_inputs(
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    next_positions: Tensor,
    last_tokens: Tensor,
    rows: Tensor,
    block_table: Tensor,
    block_size: int,
) -> None:
    real = rows >= 0
    row = torch.where(real, rows, 0)
    position = torch.where(real, next_positions, 0)
    block = block_table[row, position // block_size]
    token_ids.copy_(torch.where(real, last_tokens[row], 0))
    positions.copy_(position)
    slots.copy_(torch.where(real, block * block_size + position % block_size, -1))
    context_lens.copy_(torch.where(real, position + 1, 0))
    next_positions.add_(real.int())


def attention_decode(
    out: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    workspace: Tensor,
    counters: Tensor,
    num_splits: int,
    scale: float,
) -> None:
    head_dim = kv_cache.size(-1)
    tables = block_table[torch.where(rows >= 0, rows, 0)]
    result = _attend(
        q.unflatten(-1, (-1, head_dim)).unsqueeze(1), kv_cache, tables, context_lens.unsqueeze(1) - 1, scale
    )
    out.copy_(result.reshape(out.shape))


def attention_prefill(
    out: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    scale: float,
) -> None:
    head_dim = kv_cache.size(-1)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for s, row in enumerate(rows.tolist()):
        queries = slice(starts[s], starts[s + 1])
        length = starts[s + 1] - starts[s]
        if length == 0 or row < 0:
            continue
        positions = torch.arange(contexts[s] - length, contexts[s], device=q.device).unsqueeze(0)
        heads = q[queries].unflatten(-1, (-1, head_dim)).unsqueeze(0)
        out[queries] = _attend(heads, kv_cache, block_table[row : row + 1], positions, scale).reshape(length, -1)


def _attend(q: Tensor, kv_cache: Tensor, tables: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Online softmax over groups of blocks (Milakov, Gimelshein 2018) under one mask rule: key position <= query
    position.

    q [S, L, Q, D], tables int32 [S, *], positions int [S, L] with -1 for padding; returns fp32 or fp64 [S, L, Q, D].
    """
    num_seqs, length, num_heads, head_dim = q.shape
    _, num_kv_heads, _, block_size, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    query = q.reshape(num_seqs, length, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    query = query.reshape(num_seqs * num_kv_heads, group * length, head_dim).float() * scale
    largest = query.new_full((*query.shape[:2], 1), -torch.inf)
    total = torch.zeros_like(largest)
    weighted = torch.zeros_like(query)
    num_blocks = -(-(int(positions.max()) + 1) // block_size)
    step = max(1, GROUP_TOKENS // block_size)
    for start in range(0, num_blocks, step):
        blocks = tables[:, start : min(start + step, num_blocks)]
        key_positions = torch.arange(blocks.size(1) * block_size, device=q.device) + start * block_size
        in_context = key_positions <= positions.max(dim=1, keepdim=True).values  # [S, N]
        blocks = torch.where(in_context[:, ::block_size], blocks, 0)
        cached = kv_cache[blocks].permute(3, 0, 2, 1, 4, 5).float()  # K or V, S, K, blocks, block_size, D
        key, value = cached.reshape(2, num_seqs * num_kv_heads, -1, head_dim)
        value = torch.where(in_context.repeat_interleave(num_kv_heads, 0).unsqueeze(-1), value, 0)  # 0 * NaN is NaN
        visible = key_positions <= positions.unsqueeze(-1)  # [S, L, N]
        visible = visible[:, None, None].expand(-1, num_kv_heads, group, -1, -1).reshape(*query.shape[:2], -1)
        scores = torch.bmm(query, key.transpose(1, 2)).masked_fill_(~visible, -torch.inf)
        new_largest = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
        base = torch.where(new_largest.isinf(), 0, new_largest)  # padding: nothing visible
        weights = torch.exp_(scores.sub_(base))
        rescale = torch.exp(largest - base)
        total = total * rescale + weights.sum(dim=-1, keepdim=True)
        weighted = weighted.mul_(rescale).baddbmm_(weights, value)
        largest = new_largest
    result = weighted.div_(torch.where(total == 0, 1, total))
    result = result.view(num_seqs, num_kv_heads, group, length, head_dim)
    return result.permute(0, 3, 1, 2, 4).reshape(num_seqs, length, num_heads, head_dim)


def sample(
    sampled: Tensor,
    last_tokens: Tensor,
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    workspace: Tensor,
    counters: Tensor,
) -> None:
    tokens = logits.argmax(dim=-1).int()
    for i, row in enumerate(rows.tolist()):
        if row < 0:
            tokens[i] = -1
        elif float(temperature[row]) > 0:
            probabilities = _kept_probabilities(
                logits[i].double() / float(temperature[row]), int(top_k[row]), float(top_p[row]), float(min_p[row])
            )
            cumulative = probabilities.cumsum(0)
            draw = uniform(int(seeds[row]), int(positions[i])) * cumulative[-1]
            tokens[i] = torch.searchsorted(cumulative, draw, right=True)
    sampled.copy_(tokens)
    real = rows >= 0
    last_tokens[rows[real]] = tokens[real]


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
    """A number in (0, 1) from the first word of Philox4x32-10, key = seed (low, high), counter = (position, 0, 0,
    0)."""
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
        token_ids[i, 0], values[i, 0] = sampled[i], known[sampled[i]]
        token_ids[i, 1 : asked + 1], values[i, 1 : asked + 1] = -1, -torch.inf
        token_ids[i, 1 : count + 1] = best.indices[:count]
        values[i, 1 : count + 1] = best.values[:count]


_library = torch.library.Library("tinyvllm", "IMPL", "CPU")
for _name in ops.SCHEMAS:
    _library.impl(_name, globals()[_name])
