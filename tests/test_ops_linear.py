"""The linear kernels for more than 8 rows, and what is made of several ops, against fp64 as in `test_ops`."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from test_ops import REPEATS, check, each_dtype, poisoned, randn
from torch.nn import functional

from tinyvllm_cli import gemm, ops

ROWS = [9, 16, 17, 32, 33, 64, 83, 96, 97, 100, 127, 128] if torch.cuda.is_available() else [9, 83]


@pytest.fixture(autouse=True)
def _needs_hopper(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def row_scale(g: torch.Generator, x: torch.Tensor) -> tuple[ops.RowScale, torch.Tensor]:
    """For x [T, in], and by what its rows are to be multiplied: fp64 [T, 1]."""
    squares = (torch.rand(len(x), generator=g, dtype=torch.float64) * 3 + 0.3) * x.size(1)
    sums = (squares * 2**28).long()
    factors = (sums / 2**28 / x.size(1) + 1e-3).rsqrt().unsqueeze(1)
    return ops.RowScale(sums.to(x.device), 1e-3), factors.to(x.device)


def inputs(
    g: torch.Generator, rows: int, n: int, k: int, dtype: torch.dtype, device: str, std: float, scaled: bool
) -> tuple[torch.Tensor, torch.Tensor, ops.RowScale | None, torch.Tensor, torch.Tensor]:
    """x, weight, the scale of x's rows if there is one, and x after it, in fp64 and rounded."""
    x, weight = randn(g, rows, k, dtype=dtype, device=device), randn(g, n, k, dtype=dtype, device=device, std=std)
    if not scaled:
        return x, weight, None, x.double(), x
    scale, factors = row_scale(g, x)
    return x, weight, scale, x.double() * factors, (x.double() * factors).to(dtype)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k"), [(3072, 2048), (2048, 8192), (9001, 576), (576, 1536), (8, 8), (301, 264)])
def test_linear_hopper(device: str, rows: int, n: int, k: int, scaled: bool) -> None:
    for dtype, g in each_dtype(device):
        x, weight, scale, exact_x, plain_x = inputs(g, rows, n, k, dtype, device, 0.05, scaled)
        exact, plain = exact_x @ weight.double().t(), functional.linear(plain_x, weight)
        for out_dtype in {dtype, torch.float32}:
            outs = []
            for _ in range(REPEATS if device == "cuda" else 1):
                outs.append(poisoned(rows, n, dtype=out_dtype, device=device))
                ops.linear_hopper(outs[-1], x, weight, scale)
            assert all(torch.equal(out, outs[0]) for out in outs)
            check(outs[0], exact.cpu(), plain)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k"), [(8192, 512), (2048, 2048), (9000, 64), (576, 1536), (8, 8), (296, 264)])
def test_gated_linear_hopper(device: str, rows: int, n: int, k: int, scaled: bool) -> None:
    for dtype, g in each_dtype(device):
        x, weight, scale, exact_x, plain_x = inputs(g, rows, 2 * n, k, dtype, device, 0.1, scaled)
        out = poisoned(rows, n, dtype=dtype, device=device)
        ops.gated_linear_hopper(out, x, weight, scale)
        gate, up = (exact_x @ weight.double().t()).cpu().chunk(2, -1)
        plain_gate, plain_up = functional.linear(plain_x, weight).chunk(2, -1)
        check(out, functional.silu(gate) * up, functional.silu(plain_gate) * plain_up)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "rows", [1, 129, 160, 161, 200, 255, 257, 384, 1000, 2500] if torch.cuda.is_available() else [83]
)
@pytest.mark.parametrize(("n", "k"), [(8192, 2048), (1536, 576), (136, 264), (8, 8)])
def test_gated_linear_wide(device: str, rows: int, n: int, k: int, scaled: bool) -> None:
    for dtype, g in each_dtype(device):
        x, weight, scale, exact_x, plain_x = inputs(g, rows, 2 * n, k, dtype, device, 0.1, scaled)
        outs = []
        for _ in range(REPEATS if device == "cuda" else 1):
            outs.append(poisoned(rows, n, dtype=dtype, device=device))
            ops.gated_linear_wide(outs[-1], x, weight, scale)
        assert all(torch.equal(out, outs[0]) for out in outs)
        gate, up = (exact_x @ weight.double().t()).cpu().chunk(2, -1)
        plain_gate, plain_up = functional.linear(plain_x, weight).chunk(2, -1)
        check(outs[0], functional.silu(gate) * up, functional.silu(plain_gate) * plain_up)


def test_wide_use() -> None:
    shares = [gemm.wide_use(rows, 8192, 132) for rows in (129, 160, 161, 256, 257, 384, 512, 513, 8192, 32768)]
    assert [round(share, 2) for share in shares] == [0.78, 0.97, 0.81, 0.97, 0.78, 0.97, 0.97, 0.65, 0.97, 0.99]
    assert round(gemm.wide_use(256, 14336, 132), 2) == 0.85
    assert gemm.wide_use(256 * 66, 128, 132) == 1.0


WIDE_ROWS = [1, 129, 161, 200, 256, 300] if torch.cuda.is_available() else [83]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("rows", WIDE_ROWS)
@pytest.mark.parametrize(("n", "k"), [(3072, 2048), (2048, 2048), (9000, 264), (576, 1536), (136, 264), (8, 8)])
def test_linear_wide(device: str, rows: int, n: int, k: int, scaled: bool) -> None:
    for dtype, g in each_dtype(device):
        x, weight, scale, exact_x, plain_x = inputs(g, rows, n, k, dtype, device, 0.05, scaled)
        outs = []
        for _ in range(REPEATS if device == "cuda" else 1):
            outs.append(poisoned(rows, n, dtype=dtype, device=device))
            ops.linear_wide(outs[-1], x, weight, scale)
        assert all(torch.equal(out, outs[0]) for out in outs)
        check(outs[0], (exact_x @ weight.double().t()).cpu(), functional.linear(plain_x, weight))


def check_add(add: Callable[..., None], device: str, rows: int, n: int, k: int) -> None:
    for dtype, g in each_dtype(device):
        x, weight = randn(g, rows, k, dtype=dtype, device=device), randn(g, n, k, dtype=dtype, device=device, std=0.05)
        before, norm = randn(g, rows, n, dtype=dtype, device=device), randn(g, n, dtype=dtype, device=device)
        results = []
        for _ in range(REPEATS if device == "cuda" else 1):
            sums, other = torch.full((2, 2 * rows), 5, device=device)
            sums[:rows] = 0
            results.append((before.clone(), poisoned(rows, n, dtype=dtype, device=device), sums, other))
            add(*results[-1], x, weight, norm)
            assert other.tolist() == [0] * rows + [5] * rows
            assert sums[rows:].tolist() == [5] * rows
        residual, scaled, sums, _ = results[0]
        assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))
        exact = before.double() + x.double() @ weight.double().t()
        check(residual, exact.cpu(), before + functional.linear(x, weight))
        assert torch.equal(scaled, (residual.float() * norm.float()).to(dtype))
        squares = residual.double().square().sum(1)
        assert (sums[:rows].double() / 2**28 - squares).abs().max() <= 1e-5 * squares.max()
        alone, other = before.clone(), torch.full((rows,), 5, device=device)
        add(alone, None, None, other, x, weight, None)
        assert torch.equal(alone, residual)
        assert not other.any()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("n", "k"), [(2048, 8192), (2048, 2048), (3072, 512), (9000, 264), (576, 1536), (136, 264), (8, 8)]
)
def test_add_linear_hopper(device: str, rows: int, n: int, k: int) -> None:
    check_add(ops.add_linear_hopper, device, rows, n, k)


@pytest.mark.parametrize("rows", WIDE_ROWS)
@pytest.mark.parametrize(
    ("n", "k"), [(2048, 8192), (2048, 2048), (3072, 512), (9000, 264), (576, 1536), (136, 264), (8, 8)]
)
def test_add_linear_wide(device: str, rows: int, n: int, k: int) -> None:
    check_add(ops.add_linear_wide, device, rows, n, k)


@pytest.mark.parametrize("rows", [*ROWS, *([129, 161, 192, 200, 256] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize(("n", "k"), [(40000, 64), (9001, 128), (8, 8), (301, 264)])
def test_argmax_linear_hopper(device: str, rows: int, n: int, k: int) -> None:
    for dtype, g in each_dtype(device):  # small whole numbers: sums are exact, and equal ones are many
        x, weight = (torch.randint(-1, 2, (size, k), generator=g).to(device, dtype) for size in (rows, n))
        weight[n // 2] = 0
        x[0] = 0
        x[1], weight[n - 1] = 1, 1
        owners = torch.randperm(rows + 3, generator=g)[:rows].to(device, torch.int32)
        owners[rows // 2] = -1
        ranks = torch.zeros(rows, dtype=torch.int64, device=device)
        expected = (x.float() @ weight.float().t()).argmax(dim=-1).int()
        for _ in range(REPEATS if device == "cuda" else 1):
            sampled = torch.full((rows,), -7, dtype=torch.int32, device=device)
            last = torch.full((rows + 3,), -7, dtype=torch.int32, device=device)
            ops.argmax_linear_hopper(sampled, last, ranks, x, weight, owners)
            real = owners >= 0
            assert sampled.tolist() == torch.where(real, expected, -1).tolist()
            assert last[owners[real]].tolist() == expected[real].tolist()
            assert int((last != -7).sum()) == rows - 1
            assert not ranks.any()


@pytest.mark.parametrize("feature", [0, 7, 140, 899])
@pytest.mark.parametrize("rows", [9, 33, 65, 128, 180, 200])
def test_argmax_linear_hopper_without_numbers(device: str, rows: int, feature: int) -> None:
    """Rows with NaN, with +inf and with nothing but -inf have no token; those with some -inf have one."""
    for dtype, g in each_dtype(device):  # whole numbers, whose sums are exact
        x, weight = (torch.randint(1, 4, (size, 264), generator=g).to(device, dtype) for size in (rows, 900))
        x[1, 5], x[2, 1], x[rows - 1, 2] = math.nan, math.inf, -math.inf
        owners = torch.randperm(rows + 3, generator=g)[:rows].to(device, torch.int32)
        ranks = torch.zeros(rows, dtype=torch.int64, device=device)
        for value in (1.0, -math.inf, math.inf, math.nan, -math.nan):
            weight[feature, 3] = value
            logits = x.float() @ weight.float().t()
            best = torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), -1).int()
            assert int((best >= 0).sum()) == (rows - 3 if value < 2 else 0)
            sampled = torch.full((rows,), -7, dtype=torch.int32, device=device)
            last = torch.full((rows + 3,), -7, dtype=torch.int32, device=device)
            ops.argmax_linear_hopper(sampled, last, ranks, x, weight, owners)
            assert sampled.tolist() == best.tolist()
            assert last[owners.long()].tolist() == sampled.clamp_min(0).tolist()
            assert not ranks.any()


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_does_not_depend_on_the_number_of_rows(device: str, rows: int) -> None:
    """But for the two forms of the kernel, which split K differently."""
    for dtype, g in each_dtype(device):
        count = 96 if rows <= 96 else 128
        x = randn(g, count, 512, dtype=dtype, device=device)
        weight = randn(g, 3072, 512, dtype=dtype, device=device)
        most, some = (torch.empty(n, 3072, dtype=dtype, device=device) for n in (count, rows))
        ops.linear_hopper(most, x, weight)
        ops.linear_hopper(some, x[:rows].contiguous(), weight)
        assert device == "cpu" or torch.equal(some, most[:rows])


@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 576, 1536), (8, 576, 1536), (83, 576, 1536), (200, 576, 8192), (300, 576, 1536)]
)
def test_add_linear_norm(device: str, rows: int, n: int, k: int) -> None:
    """By each of the kernels that multiply so many rows."""
    for dtype, g in each_dtype(device):
        x, weight = randn(g, rows, k, dtype=dtype, device=device), randn(g, n, k, dtype=dtype, device=device, std=0.05)
        before, norm = randn(g, rows, n, dtype=dtype, device=device), randn(g, n, dtype=dtype, device=device)
        out, projection = (poisoned(rows, n, dtype=dtype, device=device) for _ in range(2))
        residual = before.clone()
        ops.add_linear_norm(out, residual, projection, x, weight, norm, 1e-5)
        exact = (before.double() + x.double() @ weight.double().t()).cpu()
        plain = before + functional.linear(x, weight)
        check(residual, exact, plain)
        check(out, *(functional.rms_norm(s, (n,), norm.to(s), 1e-5) for s in (exact, plain)))
