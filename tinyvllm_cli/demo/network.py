"""The demo model as a training module: Llama 3.2 in small, written plainly, and its Hugging Face folder.

Master weights are fp32; every product is computed with their bf16 roundings, which are what is saved at the end.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tinyvllm_cli.demo.tokens import SPECIALS, VOCAB_SIZE


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; rope_* are those of Llama 3's frequency scaling."""

    hidden: int = 256
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 640
    vocab: int = VOCAB_SIZE
    max_positions: int = 1024
    eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_factor: float = 8.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_original: int = 128


def rope_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim/2] in fp32: low frequencies are slowed by the factor, middle ones blended."""
    frequency = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    turns = shape.rope_original * frequency / (2 * math.pi)  # turns made within the original context
    keep = ((turns - shape.rope_low) / (shape.rope_high - shape.rope_low)).clamp(0, 1)
    frequency = keep * frequency + (1 - keep) * frequency / shape.rope_factor
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [B, heads, T, head_dim], pairing element i with i + head_dim/2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    """Attention and SwiGLU, each behind RMSNorm and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q, kv, hidden, inner = (
            shape.heads * shape.head_dim,
            shape.kv_heads * shape.head_dim,
            shape.hidden,
            shape.intermediate,
        )
        out_std = 0.02 / math.sqrt(2 * shape.layers)
        self.attn_norm, self.mlp_norm = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.q, self.k, self.v = (nn.Parameter(torch.randn(rows, hidden) * 0.02) for rows in (q, kv, kv))
        self.o = nn.Parameter(torch.randn(hidden, q) * out_std)
        self.gate, self.up = (nn.Parameter(torch.randn(inner, hidden) * 0.02) for _ in range(2))
        self.down = nn.Parameter(torch.randn(hidden, inner) * out_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, hidden] -> the same; causal."""
        shape, dtype = self.shape, x.dtype
        batch, length, _ = x.shape
        h = F.rms_norm(x, (shape.hidden,), self.attn_norm.to(dtype), shape.eps)
        q, k, v = (
            F.linear(h, weight.to(dtype)).view(batch, length, -1, shape.head_dim).transpose(1, 2)
            for weight in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        share = shape.heads // shape.kv_heads
        attended = F.scaled_dot_product_attention(
            q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), is_causal=True
        )
        x = x + F.linear(attended.transpose(1, 2).reshape(batch, length, -1), self.o.to(dtype))
        h = F.rms_norm(x, (shape.hidden,), self.mlp_norm.to(dtype), shape.eps)
        return x + F.linear(
            F.silu(F.linear(h, self.gate.to(dtype))) * F.linear(h, self.up.to(dtype)), self.down.to(dtype)
        )


class Llama(nn.Module):
    """ids [B, T] -> final hidden states [B, T, hidden]; `logits` turns those into scores with the tied embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.embed = nn.Parameter(torch.randn(shape.vocab, shape.hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        cos, sin = rope_tables(shape, shape.max_positions)
        self.register_buffer("cos", cos.to(dtype), persistent=False)
        self.register_buffer("sin", sin.to(dtype), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        x = F.embedding(ids, self.embed.to(self.dtype))
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.rms_norm(x, (self.shape.hidden,), self.norm.to(self.dtype), self.shape.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 scores [..., vocab]."""
        return F.linear(hidden, self.embed.to(self.dtype)).float()


def save_folder(model: Llama, folder: Path) -> None:
    """config.json, generation_config.json and model.safetensors (bf16) under Hugging Face's names."""
    shape = model.shape
    names = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    tensors = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for i, block in enumerate(model.blocks):
        for name, parameter in block.named_parameters():
            tensors[f"model.layers.{i}.{names[name]}.weight"] = parameter
    save_file(
        {name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    first_special = shape.vocab - len(SPECIALS)
    begin, end_of_text, end_of_turn = first_special, first_special + 1, first_special + 4
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": shape.rope_factor,
            "low_freq_factor": shape.rope_low,
            "high_freq_factor": shape.rope_high,
            "original_max_position_embeddings": shape.rope_original,
        },
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": begin,
        "eos_token_id": [end_of_text, end_of_turn],
        "pad_token_id": first_special + 5,
        "use_cache": True,
    }
    generation = {
        "bos_token_id": begin,
        "eos_token_id": [end_of_text, end_of_turn],
        "pad_token_id": first_special + 5,
        "do_sample": False,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
