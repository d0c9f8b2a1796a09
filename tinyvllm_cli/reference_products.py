"""Plain torch versions of the ops that multiply by a matrix of weights, see `reference.py`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

UNITS_OF_ONE = 2.0**28
"""Sums of squares are int64, of so many units for 1."""


def matvec(out: Tensor, x: Tensor, weight: Tensor) -> None:
    out.copy_(x.float() @ weight.float().t())


def linear_hopper(out: Tensor, x: Tensor, weight: Tensor, sums: Tensor | None, eps: float) -> None:
    out.copy_(_scaled_product(x, weight, sums, eps))


def _scaled_product(x: Tensor, weight: Tensor, sums: Tensor | None, eps: float) -> Tensor:
    product = x.float() @ weight.float().t()
    if sums is None:
        return product
    squares = sums[: len(x)].double() / UNITS_OF_ONE
    return product * torch.rsqrt(squares / x.size(1) + eps).float().unsqueeze(1)


def add_linear_hopper(
    residual: Tensor, scaled: Tensor | None, sums: Tensor | None, other_sums: Tensor | None, x: Tensor, weight: Tensor,
    norm: Tensor | None,
) -> None:  # fmt: skip
    residual.copy_(residual.float() + x.float() @ weight.float().t())
    if scaled is not None and sums is not None and norm is not None:
        torch.mul(residual.float(), norm.float(), out=scaled)
        sums[: len(x)] += (residual.double().square().sum(1) * UNITS_OF_ONE).round().long()
    if other_sums is not None:
        other_sums[: len(x)] = 0


def gated_linear_hopper(out: Tensor, x: Tensor, weight: Tensor, sums: Tensor | None, eps: float) -> None:
    gate, up = _scaled_product(x, weight, sums, eps).chunk(2, dim=-1)
    torch.mul(functional.silu(gate), up, out=out)


gated_linear_wide, linear_wide, add_linear_wide = gated_linear_hopper, linear_hopper, add_linear_hopper


def argmax_linear_hopper(
    sampled: Tensor, last_tokens: Tensor, ranks: Tensor, x: Tensor, weight: Tensor, rows: Tensor
) -> None:
    take_best(sampled, last_tokens, x.float() @ weight.float().t(), rows)


def take_best(sampled: Tensor, last_tokens: Tensor, logits: Tensor, rows: Tensor) -> None:
    best = logits.argmax(dim=-1)  # NaN is the largest of all
    known = (rows >= 0) & logits.gather(1, best.unsqueeze(1)).squeeze(1).isfinite()
    sampled.copy_(torch.where(known, best, -1))
    last_tokens[rows[rows >= 0]] = sampled[rows >= 0].clamp_min(0)
