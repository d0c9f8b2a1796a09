"""Random weights of any supported shape, made on the device: benchmarks without a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tinyvllm_cli.checkpoint.names import weights_layout
from tinyvllm_cli.checkpoint.weights import Weights, arena_views

if TYPE_CHECKING:
    from tinyvllm_cli.checkpoint.config import ModelConfig

STD = 0.02
"""Standard deviation of the projections and embeddings; norms are one."""


def random_weights(config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Weights:
    """Weights as of `arena_views`, drawn from a normal distribution: the same for the same seed, device and shape."""
    _, total = weights_layout(config, dtype.itemsize)
    weights = arena_views(config, torch.empty(total, dtype=torch.uint8, device=device), dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for layer in weights.layers:
        layer.attn_norm.fill_(1)
        layer.mlp_norm.fill_(1)
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            matrix.normal_(std=STD, generator=generator)
    weights.final_norm.fill_(1)
    weights.embed.normal_(std=STD, generator=generator)
    if weights.lm_head is not weights.embed:
        weights.lm_head.normal_(std=STD, generator=generator)
    return weights
