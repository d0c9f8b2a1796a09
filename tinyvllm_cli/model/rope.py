"""The RoPE table: one rule, used by prefill and decode alike."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tinyvllm_cli.checkpoint.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of elements, fp32 [head_dim / 2] (RoFormer, Su et al. 2021).

    "linear" divides all by `factor`. "llama3" divides the low frequencies by `factor`, leaves the high ones, and blends
    between (Llama 3 herd of models, 2024): a wavelength is low from original_max_position / low_freq_factor on, high
    below original_max_position / high_freq_factor.
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind != "llama3":
        raise ValueError(f"unknown RoPE kind {rope.kind}")
    wavelengths = 2 * math.pi / frequencies
    ratio = rope.original_max_position_embeddings / wavelengths
    smooth = (ratio - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def rope_table(out: Tensor, rope: RopeConfig, head_dim: int) -> None:
    """Fills out, fp32 [max_position, head_dim], by rows: head_dim / 2 cosines, then as many sines of the angles."""
    positions = torch.arange(out.size(0), dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    out[:, : head_dim // 2] = angles.cos()
    out[:, head_dim // 2 :] = angles.sin()
