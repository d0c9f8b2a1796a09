"""Every op against a naive computation in fp64: the reference on the CPU, the kernels on CUDA.

The error may be at most twice that of the same computation in plain torch at the input's dtype, plus a floor. Outputs,
unused cache slots and padding of the block table are poisoned before each call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tinyvllm_cli import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOOR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
TOKENS = [1, 7, 19, 83, 989]
REPEATS = 50
BAD_BLOCK = 2**30  # an index that no test's cache has


def dtypes_of(device: str) -> list[torch.dtype]:
    return DTYPES if device == "cpu" else DTYPES[1:]


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def check(actual: Tensor, exact: Tensor, plain: Tensor) -> None:
    """actual: what the op gave; exact: fp64; plain: the same in torch at the op's dtype."""
    scale = exact.abs().max().clamp_min(1e-30)
    assert actual.shape == exact.shape
    assert torch.isfinite(actual).all()
    error = (actual.double().cpu() - exact).abs().max() / scale
    allowed = (plain.double().cpu() - exact).abs().max() / scale
    assert error <= 2 * allowed + FLOOR[actual.dtype], f"error {error:.3g}, plain torch {allowed:.3g}"


def each_dtype(device: str) -> Iterator[tuple[torch.dtype, torch.Generator]]:
    for dtype in dtypes_of(device):
        yield dtype, torch.Generator().manual_seed(7)


def randn(generator: torch.Generator, *shape: int, dtype: torch.dtype, device: str, std: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=generator) * std).to(dtype).to(device)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_embedding(device: str, num_tokens: int) -> None:
    for dtype, g in each_dtype(device):
        weight = randn(g, 300, 264, dtype=dtype, device=device)
        ids = torch.randint(0, 300, (num_tokens,), generator=g, dtype=torch.int32)
        ids[num_tokens // 2] = -1
        out = poisoned(num_tokens, 264, dtype=dtype, device=device)
        ops.embedding(out, weight, ids.to(device))
        expected = weight.cpu()[ids.clamp_min(0).long()]
        expected[ids < 0] = 0
        assert torch.equal(out.cpu(), expected)


def norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double().cpu(), weight.double().cpu()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("hidden", [64, 576, 2048, 4096, 8192])
def test_rms_norm(device: str, num_tokens: int, hidden: int) -> None:
    for dtype, g in each_dtype(device):
        x, weight = (
            randn(g, num_tokens, hidden, dtype=dtype, device=device),
            randn(g, hidden, dtype=dtype, device=device),
        )
        out = poisoned(num_tokens, hidden, dtype=dtype, device=device)
        ops.rms_norm(out, x, weight, 1e-5)
        check(out, norm64(x, weight, 1e-5), functional.rms_norm(x, (hidden,), weight, 1e-5))


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("hidden", [64, 576, 2048, 8192])
def test_add_rms_norm(device: str, num_tokens: int, hidden: int) -> None:
    for dtype, g in each_dtype(device):
        x, weight = (
            randn(g, num_tokens, hidden, dtype=dtype, device=device),
            randn(g, hidden, dtype=dtype, device=device),
        )
        residual = randn(g, num_tokens, hidden, dtype=dtype, device=device)
        total = residual + x
        out = poisoned(num_tokens, hidden, dtype=dtype, device=device)
        ops.add_rms_norm(out, residual, x, weight, 1e-5)
        assert torch.equal(residual, total)
        check(out, norm64(total, weight, 1e-5), functional.rms_norm(total, (hidden,), weight, 1e-5))


def rotated(qkv: Tensor, table: Tensor, positions: Tensor, num_kv_heads: int) -> Tensor:
    """The heads [T, *, D] of qkv [T, * D], those of q and k turned by the angles of their positions, at qkv's dtype."""
    heads = qkv.unflatten(-1, (-1, table.size(1)))
    cos, sin = table[positions.long()].to(qkv.dtype).unsqueeze(1).chunk(2, -1)
    first, second = heads[:, :-num_kv_heads].chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((turned, heads[:, -num_kv_heads:]), 1)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (9, 3, 64), (32, 8, 128), (7, 1, 64)])
@pytest.mark.parametrize("block_size", [16, 8])
def test_rope_store(
    device: str, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    for dtype, g in each_dtype(device):
        width = (num_heads + 2 * num_kv_heads) * head_dim
        qkv = randn(g, num_tokens, width, dtype=dtype, device=device)
        table = torch.randn(500, head_dim, generator=g)
        positions = torch.randint(0, 500, (num_tokens,), generator=g, dtype=torch.int32)
        num_blocks = -(-num_tokens // block_size) + 3
        slots = torch.randperm(num_blocks * block_size, generator=g)[:num_tokens].int()
        slots[num_tokens // 3] = -1
        cache = poisoned(num_blocks, num_kv_heads, 2, block_size, head_dim, dtype=dtype, device=device)
        exact, plain = (rotated(x, table, positions, num_kv_heads) for x in (qkv.double().cpu(), qkv.cpu()))
        kept = slots >= 0
        for heads in (exact, plain):
            heads[~kept] = qkv[~kept.to(device)].to(heads).view(-1, *heads.shape[1:])  # left alone
        ops.rope_store(qkv, cache, table.to(device), positions.to(device), slots.to(device))
        q = qkv.view(num_tokens, -1, head_dim)[:, :num_heads]
        check(q, exact[:, :num_heads], plain[:, :num_heads])
        cache, stored = cache.cpu(), torch.zeros(num_blocks, block_size, dtype=torch.bool)
        block, offset = slots[kept].long() // block_size, slots[kept].long() % block_size
        stored[block, offset] = True
        if kept.any():
            check(
                cache[block, :, 0, offset], exact[kept, num_heads:-num_kv_heads], plain[kept, num_heads:-num_kv_heads]
            )
            assert torch.equal(cache[block, :, 1, offset].double(), exact[kept, -num_kv_heads:])
        assert cache.permute(0, 3, 1, 2, 4)[~stored].isnan().all(), "a slot was written that is none of these tokens'"


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("width", [24, 1536, 8192])
def test_silu_mul(device: str, num_tokens: int, width: int) -> None:
    for dtype, g in each_dtype(device):
        gate_up = randn(g, num_tokens, 2 * width, dtype=dtype, device=device, std=3)
        out = poisoned(num_tokens, width, dtype=dtype, device=device)
        ops.silu_mul(out, gate_up)
        gate, up = gate_up.double().cpu().chunk(2, -1)
        plain_gate, plain_up = gate_up.chunk(2, -1)
        check(out, functional.silu(gate) * up, functional.silu(plain_gate) * plain_up)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("n", "k"), [(3072, 2048), (2048, 8192), (5001, 576), (576, 1536), (1, 8), (301, 264)])
def test_matvec(device: str, rows: int, n: int, k: int) -> None:
    for dtype, g in each_dtype(device):
        x, weight = randn(g, rows, k, dtype=dtype, device=device), randn(g, n, k, dtype=dtype, device=device, std=0.05)
        exact, plain = x.double().cpu() @ weight.double().cpu().t(), functional.linear(x, weight)
        for out_dtype in {dtype, torch.float32}:
            out = poisoned(rows, n, dtype=out_dtype, device=device)
            ops.matvec(out, x, weight)
            check(out, exact, plain)


@pytest.mark.parametrize("rows", [1, 8, 9, 64])
def test_linear_to_logits(device: str, rows: int) -> None:
    for dtype, g in each_dtype(device):
        x, weight = randn(g, rows, 256, dtype=dtype, device=device), randn(g, 1000, 256, dtype=dtype, device=device)
        for out_dtype in {dtype, torch.float32}:
            out = poisoned(rows, 1000, dtype=out_dtype, device=device)
            ops.linear(out, x, weight)
            check(out, x.double().cpu() @ weight.double().cpu().t(), functional.linear(x, weight))


def paged(
    g: torch.Generator, contexts: list[int], num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A poisoned cache with shuffled blocks: (kv_cache, block_table, [kv fp64 [K, 2, context, D] of each sequence])."""
    needed = [-(-c // block_size) for c in contexts]
    order = torch.randperm(sum(needed) + 2, generator=g).int()
    cache = torch.full((sum(needed) + 2, num_kv_heads, 2, block_size, head_dim), math.nan, dtype=dtype)
    table = torch.full((len(contexts) + 1, max(needed, default=0) + 3), BAD_BLOCK, dtype=torch.int32)
    dense, used = [], 0
    for s, context in enumerate(contexts):
        kv = torch.randn(num_kv_heads, 2, context, head_dim, generator=g).to(dtype)
        blocks = order[used : used + needed[s]]
        used += needed[s]
        table[s, : needed[s]] = blocks
        for i, block in enumerate(blocks.tolist()):
            part = kv[:, :, i * block_size : (i + 1) * block_size]
            cache[block, :, :, : part.size(2)] = part
        dense.append(kv)
    return cache, table, dense


def attention(q: Tensor, kv: Tensor, position: int, scale: float) -> Tensor:
    """q [L, Q, D] at positions position - L + 1..position over kv [K, 2, context, D], at kv's dtype."""
    length, num_heads, _ = q.shape
    group = num_heads // kv.size(0)
    key, value = (kv[:, i].repeat_interleave(group, 0) for i in range(2))
    scores = torch.einsum("lhd,hcd->hlc", q, key) * scale
    rows = torch.arange(position - length + 1, position + 1).unsqueeze(1)
    scores = scores.masked_fill(torch.arange(kv.size(2)) > rows, -math.inf)
    return torch.einsum("hlc,hcd->lhd", scores.softmax(-1), value)


GQA = [(2, 2), (9, 3), (16, 4), (7, 1), (8, 1), (16, 1)]
LONG = 4097 if torch.cuda.is_available() else 530
EDGES = [1, 15, 16, 17, 33, 255, LONG]


CHUNKS = [  # (context, queries at its end)
    [(1, 1), (7, 7), (16, 16), (17, 17), (83, 83)],
    [(64, 1), (65, 64), (300, 17), (16, 3), (589, 100), (31, 31)],
    [(513, 513), (LONG, 40)],
]


def check_attention_prefill(
    device: str,
    chunks: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    repeats: int = 1,
) -> None:
    scale = head_dim**-0.5
    contexts, lengths = [c for c, _ in chunks], [n for _, n in chunks]
    for dtype, g in each_dtype(device):
        cache, table, dense = paged(g, contexts, num_kv_heads, head_dim, block_size, dtype)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        qkv = randn(g, int(starts[-1]), (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)
        q = qkv[:, : num_heads * head_dim]
        rows, lens = torch.arange(len(chunks), dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32)
        inputs = [t.to(device) for t in (cache, table, rows, starts, lens)]
        outs = []
        for _ in range(repeats):
            out = poisoned(int(starts[-1]), num_heads * head_dim, dtype=dtype, device=device)
            ops.attention_prefill(out, q, *inputs, max(lengths), scale)
            outs.append(out)
        assert all(torch.equal(out, outs[0]) for out in outs)
        result, heads = outs[0].cpu(), q.cpu().unflatten(-1, (num_heads, head_dim))
        for s, (context, _) in enumerate(chunks):
            part = slice(int(starts[s]), int(starts[s + 1]))
            if part.start == part.stop:
                continue
            exact = attention(heads[part].double(), dense[s].double(), context - 1, scale)
            plain = attention(heads[part], dense[s], context - 1, scale)
            check(result[part], exact.flatten(1), plain.flatten(1))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GQA)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_attention_prefill(
    device: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    chunks: list[tuple[int, int]],
) -> None:
    check_attention_prefill(device, chunks, num_heads, num_kv_heads, head_dim, block_size)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 64), (4, 4, 128)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_attention_prefill_of_many(
    device: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    """More work than the kernel has CTAs, unevenly spread: short chunks, also empty ones, around a long one."""
    chunks = [(i % 50 + 1 + i % 3 * 16, (i % 50 + 1) * (i != 7)) for i in range(60)]
    chunks.insert(23, (LONG // 2, LONG // 2))
    repeats = REPEATS if device == "cuda" else 1
    check_attention_prefill(device, chunks, num_heads, num_kv_heads, head_dim, block_size, repeats)
