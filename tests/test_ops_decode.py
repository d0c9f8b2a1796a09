"""The ops of decode steps as test_ops.py has the others: inputs from the state on the device, and attention."""

from __future__ import annotations

import math

import pytest
import test_ops
import torch
from test_ops import EDGES, GQA, LONG, attention, check, each_dtype, paged, poisoned, randn

from tinyvllm_cli import ops


def test_decode_inputs(device: str) -> None:
    rows = torch.tensor([2, -1, 0, 3, -1], dtype=torch.int32)
    next_positions = torch.tensor([17, 5, 0, 79, -1], dtype=torch.int32)
    last_tokens = torch.tensor([10, 11, 12, 13], dtype=torch.int32)
    token_ids, context_lens = (torch.full((5,), 77, dtype=torch.int32, device=device) for _ in range(2))
    after = next_positions.to(device)
    ops.decode_inputs(token_ids, context_lens, after, last_tokens.to(device), rows.to(device))
    assert token_ids.tolist() == [12, 0, 10, 13, 0]
    assert context_lens.tolist() == [18, 0, 1, 80, 0]
    assert after.tolist() == [18, 5, 1, 80, -1]


@pytest.mark.parametrize(("num_splits", "min_warps"), [(1, 1), (2, 1), (3, 1), (3, 8), (7, 1), (7, 4), (65, 1)])
@pytest.mark.parametrize("lengths", [[1], [40000], [1030] * 9, [0, 5000, 0, 17, 300], [20 + i * i for i in range(300)]])
def test_decode_parts(device: str, lengths: list[int], num_splits: int, min_warps: int) -> None:
    """The parts of each context follow each other from its first tile to its last; the CPU only tells of contexts."""
    count, empty = len(lengths), [0, -1, 0, 0, 0, 0, 0]
    rows = [-1 if length == 0 else 7 * i % 301 for i, length in enumerate(lengths)]
    parts = torch.full((count * num_splits, 8), test_ops.BAD_BLOCK, dtype=torch.int32, device=device)
    sequences = (torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, lengths))
    ops.decode_parts(parts, *sequences, 9, 3, 64, num_splits, min_warps)
    if device == "cpu":
        assert parts[:count, 1:3].tolist() == [list(pair) for pair in zip(rows, lengths, strict=True)]
        return
    table = parts.tolist()
    total = table[0][-1]
    assert count <= total <= count * num_splits
    assert all(part == [*empty, total] or part == [test_ops.BAD_BLOCK] * 8 for part in table[total:])
    assert sorted({part[0] for part in table[:total]}) == list(range(count))
    for seq, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        mine = [part for part in table[:total] if part[0] == seq]
        ends = [part[4] for part in mine]
        for index, (part, first) in enumerate(zip(mine, [0, *ends], strict=False)):
            assert part == [seq, row, length, first, ends[index], index, len(mine), total]
        assert ends[-1] == -(-length // 16)
        assert ends == sorted(ends)


def check_attention_decode(
    device: str,
    contexts: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    sharpness: float = 1.0,
) -> None:
    scale = sharpness * head_dim**-0.5
    for dtype, g in each_dtype(device):
        cache, table, dense = paged(g, contexts, num_kv_heads, head_dim, block_size, dtype)
        order = torch.randperm(len(contexts), generator=g).tolist()
        rows = torch.tensor([*order, -1], dtype=torch.int32)
        lens = torch.tensor([*(contexts[s] for s in order), 0], dtype=torch.int32)
        qkv = randn(g, len(rows), (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)
        angles = torch.randn(max(contexts), head_dim, generator=g)
        positions = (lens - 1).clamp_min(0)
        blocks = table[rows[:-1].long(), positions[:-1].long() // block_size].long()
        slots = torch.full_like(lens, -1)
        slots[:-1] = blocks * block_size + positions[:-1] % block_size
        newest = (blocks, positions[:-1].long() % block_size)
        cache.permute(0, 3, 1, 2, 4)[newest] = math.nan  # to be stored, and never read
        inputs, sequences = ([t.to(device) for t in some] for some in ((angles, table), (rows, lens)))
        copy, stored = qkv.clone(), cache.to(device, copy=True)
        ops.rope_store(copy, stored, inputs[0], positions.to(device), slots.to(device))
        heads = copy[:, : num_heads * head_dim].cpu().unflatten(-1, (num_heads, head_dim))
        for s, key_value in zip(order, stored.cpu().permute(0, 3, 1, 2, 4)[newest], strict=True):
            dense[s][:, :, -1] = key_value
        one = [(heads[i : i + 1], dense[s], contexts[s] - 1) for i, s in enumerate(order)]
        exact = [attention(query.double(), kv.double(), position, scale).flatten() for query, kv, position in one]
        plain = [attention(query, kv, position, scale).flatten() for query, kv, position in one]
        for num_splits, min_warps in (
            ((1, 1), (2, 1), (3, 4), (7, 1), (7, 64), (64, 1)) if device == "cuda" else ((1, 1),)
        ):
            parts = torch.full((len(rows) * num_splits, 8), test_ops.BAD_BLOCK, dtype=torch.int32, device=device)
            ops.decode_parts(parts, *sequences, num_heads, num_kv_heads, head_dim, num_splits, min_warps)
            workspace = torch.zeros(4 + len(rows) * num_heads * num_splits * (head_dim + 4), device=device)
            kv_cache, outs = cache.to(device, copy=True), []
            for _ in range(test_ops.REPEATS if device == "cuda" else 2):
                out = poisoned(len(rows), num_heads * head_dim, dtype=dtype, device=device)
                ops.attention_decode(out, qkv, kv_cache, *inputs, parts, workspace, num_splits, min_warps, scale)
                outs.append(out)
            assert torch.equal(kv_cache.view(torch.int16), stored.view(torch.int16)), "the cache is not as rope_store's"
            assert all(torch.equal(out, outs[0]) for out in outs)
            assert int(workspace.view(torch.int32).count_nonzero()) == 0
            result = outs[0].cpu()
            assert (result[-1] == 0).all()
            for i in range(len(order)):
                check(result[i], exact[i], plain[i])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GQA)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 64])
def test_attention_decode(device: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    check_attention_decode(device, EDGES, num_heads, num_kv_heads, head_dim, block_size)


@pytest.mark.parametrize("num_seqs", [20, 40, 80, 300])
def test_attention_decode_of_many(device: str, num_seqs: int) -> None:
    """Uneven batches: the more sequences, the fewer warps the kernel gives to each."""
    contexts = [i % 50 + 1 if i % 13 else LONG // 4 + i for i in range(num_seqs)]
    check_attention_decode(device, contexts, 8, 8, 64, 16)


@pytest.mark.parametrize("contexts", [[8 * LONG], [31 * LONG + 1, 5], [LONG, LONG - 40, LONG + 3]])
def test_attention_decode_of_long_contexts(device: str, contexts: list[int]) -> None:
    """Up to 127,008 tokens on CUDA: parts of one context, of uneven ones, of equal ones; scores of a wide range."""
    check_attention_decode(device, contexts, 4, 1, 64, 16, sharpness=5.0)
