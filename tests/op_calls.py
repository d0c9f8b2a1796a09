"""For each op a valid call of its binding on the CPU, and what its launcher should get then."""

from __future__ import annotations

from typing import Any

import torch

WORKSPACE_FLOATS = 100
"""Of a row, as the recording launcher of `sample` asks for."""
BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
T, H, V, Q, K, D, BS, B = 6, 32, 40, 6, 2, 64, 16, 5  # tokens, hidden, vocabulary, heads, kv heads, head_dim, cache
S, MAX_SEQS, WIDTH, SPLITS, INTER, N = 3, 7, 4, 2, 48, 24  # sequences, table, splits, intermediate, out features
W = 5  # columns of log-probabilities

Call = tuple[dict[str, Any], dict[str, float]]


def new(*shape: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def calls(act: torch.dtype = BF16) -> dict[str, Call]:
    """For each op a valid call: its arguments, and what the launcher should get that is no tensor of the same name."""
    qkv = new(T, (Q + 2 * K) * D, dtype=act)
    cache = new(B, K, 2, BS, D, dtype=act)
    dtype = {torch.float16: 1, BF16: 2}[act]
    cache_sizes = {"num_heads": Q, "num_kv_heads": K, "head_dim": D, "block_size": BS, "dtype": dtype}
    width = (Q + 2 * K) * D
    tokens = {"num_tokens": T, "hidden_size": H, "dtype": dtype}
    sequences = {"rows": new(S), "context_lens": new(S), "block_table": new(MAX_SEQS, WIDTH)}
    x_and_weight = {"x": new(T, H, dtype=act), "weight": new(N, H, dtype=act)}
    product = {"num_rows": T, "out_features": N, "in_features": H, "dtype": dtype}
    residual = {name: new(T, N, dtype=act) for name in ("residual", "scaled")}
    residual |= {name: new(T, dtype=I64) for name in ("sums", "other_sums")}
    limits = {"temperature": F32, "top_k": I32, "top_p": F32, "min_p": F32, "seeds": I64, "last_tokens": I32}
    return {
        "embedding": (
            {"out": new(T, H, dtype=act), "weight": new(V, H, dtype=act), "token_ids": new(T)},
            {**tokens, "vocab_size": V},
        ),
        "rms_norm": (
            {"out": new(T, H, dtype=act), "x": new(T, H, dtype=act), "weight": new(H, dtype=act), "eps": 0.5},
            {**tokens, "eps": 0.5},
        ),
        "add_rms_norm": (
            {"out": new(T, H, dtype=act), "residual": new(T, H, dtype=act), "x": new(T, H, dtype=act)}
            | {"weight": new(H, dtype=act), "eps": 0.5},
            {**tokens, "eps": 0.5},
        ),
        "rope_store": (
            {"qkv": qkv, "kv_cache": cache, "rope_table": new(99, D, dtype=F32), "positions": new(T), "slots": new(T)},
            {"num_tokens": T, **cache_sizes},
        ),
        "silu_mul": (
            {"out": new(T, INTER, dtype=act), "gate_up": new(T, 2 * INTER, dtype=act)},
            {"num_tokens": T, "intermediate_size": INTER, "dtype": dtype},
        ),
        "matvec": (
            {"out": new(T, N, dtype=act), "x": new(T, H, dtype=act), "weight": new(N, H, dtype=act)},
            {"num_rows": T, "out_features": N, "in_features": H, "dtype": dtype, "out_dtype": dtype},
        ),
        "linear_hopper": (
            {"out": new(T, N, dtype=act), **x_and_weight, "sums": new(T, dtype=I64), "eps": 0.5},
            {**product, "out_dtype": dtype, "eps": 0.5},
        ),
        "add_linear_hopper": ({**residual, **x_and_weight, "norm": new(N, dtype=act)}, product),
        "gated_linear_hopper": (
            {"out": new(T, N, dtype=act), "x": new(T, H, dtype=act), "weight": new(2 * N, H, dtype=act)}
            | {"sums": new(T, dtype=I64), "eps": 0.5},
            {**product, "eps": 0.5},
        ),
        "gated_linear_wide": (
            {"out": new(T, N, dtype=act), "x": new(T, H, dtype=act), "weight": new(2 * N, H, dtype=act)}
            | {"sums": new(T, dtype=I64), "eps": 0.5},
            {**product, "eps": 0.5},
        ),
        "linear_wide": (
            {"out": new(T, N, dtype=act), **x_and_weight, "sums": new(T, dtype=I64), "eps": 0.5},
            {**product, "eps": 0.5},
        ),
        "add_linear_wide": ({**residual, **x_and_weight, "norm": new(N, dtype=act)}, product),
        "argmax_linear_hopper": (
            {"sampled": new(S), "last_tokens": new(MAX_SEQS), "ranks": new(S, dtype=I64), "x": new(S, H, dtype=act)}
            | {"weight": new(V, H, dtype=act), "rows": new(S)},
            {"num_rows": S, "out_features": V, "in_features": H, "dtype": dtype},
        ),
        "decode_inputs": (
            {name: new(S) for name in ("token_ids", "context_lens", "next_positions", "rows")}
            | {"last_tokens": new(MAX_SEQS)},
            {"num_seqs": S},
        ),
        "decode_parts": (
            {"parts": new(S * SPLITS, 8), "rows": new(S), "context_lens": new(S), "num_heads": Q, "num_kv_heads": K}
            | {"head_dim": D, "num_splits": SPLITS, "min_warps": 4},
            {"num_seqs": S, "num_heads": Q, "num_kv_heads": K, "head_dim": D, "num_splits": SPLITS, "min_warps": 4},
        ),
        "attention_decode": (
            {"out": new(S, Q * D, dtype=act), "qkv": qkv[:S], "kv_cache": cache, "parts": new(S * SPLITS, 8)}
            | {"block_table": new(MAX_SEQS, WIDTH)}
            | {"workspace": new(4 + S * Q * SPLITS * (D + 4), dtype=F32)}
            | {"rope_table": new(99, D, dtype=F32), "num_splits": SPLITS, "min_warps": 4, "scale": 0.125},
            {"table_stride": WIDTH, "num_seqs": S, **cache_sizes}
            | {"num_splits": SPLITS, "min_warps": 4, "scale": 0.125},
        ),
        "attention_prefill": (
            {"out": new(T, Q * D, dtype=act), "q": qkv[:, : Q * D], "kv_cache": cache, **sequences}
            | {"query_start": new(S + 1), "max_query_len": 5, "scale": 0.125},
            {"q_stride": width, "table_stride": WIDTH, "num_seqs": S, **cache_sizes}
            | {"max_query_len": 5, "scale": 0.125},
        ),
        "sample": (
            {"sampled": new(S), "logits": new(S, V, dtype=F32), "rows": new(S), "positions": new(S)}
            | {name: new(MAX_SEQS, dtype=kind) for name, kind in limits.items()}
            | {"workspace": new(S * WORKSPACE_FLOATS, dtype=F32), "counters": new(S)},
            {"num_rows": S, "vocab_size": V},
        ),
        "penalize": (
            {"logits": new(S, V, dtype=F32), "counts": new(MAX_SEQS, V), "rows": new(S)}
            | {name: new(MAX_SEQS, dtype=F32) for name in ("repetition", "presence", "frequency")},
            {"num_rows": S, "vocab_size": V},
        ),
        "count_tokens": (
            {"counts": new(MAX_SEQS, V), "sampled": new(S), "rows": new(S)},
            {"num_rows": S, "vocab_size": V},
        ),
        "logprobs": (
            {"values": new(S, W, dtype=F32), "token_ids": new(S, W), "logits": new(S, V, dtype=F32)}
            | {"sampled": new(S), "rows": new(S), "num_logprobs": new(MAX_SEQS)},
            {"num_rows": S, "width": W, "vocab_size": V},
        ),
        "decode_step": decode_step_call(act, dtype),
    }


def decode_step_call(act: torch.dtype, dtype: int) -> Call:
    width = (Q + 2 * K) * D
    shapes = [(H,), (width, H), (H, Q * D), (H,), (2 * INTER, H), (H, INTER)]
    layers = [new(*shape, dtype=act) for shape in 2 * shapes]
    words = 64
    arguments = {
        "logits": new(S, V, dtype=F32),
        "kv_cache": new(2, B, K, 2, BS, D, dtype=act),
        "workspace": new(words),
        "embed": new(V, H, dtype=act),
        "layers": layers,
        "final_norm": new(H, dtype=act),
        "lm_head": new(V, H, dtype=act),
        "rope_table": new(99, D, dtype=F32),
        **{name: new(S) for name in ("sampled", "next_positions", "context_lens", "rows")},
        **{"last_tokens": new(MAX_SEQS), "block_table": new(MAX_SEQS, WIDTH)},
        **{"temperature": new(MAX_SEQS, dtype=F32), "seeds": new(MAX_SEQS, dtype=I64)},
        **{"eps": 0.5, "scale": 0.125, "num_stages": 4, "times": new(3, 4, 2, dtype=I64)},
    }
    sizes = {"num_layers": 2, "hidden_size": H, "intermediate_size": INTER, "vocab_size": V, "num_heads": Q}
    sizes |= {"num_kv_heads": K, "head_dim": D, "num_rows": S, "num_blocks": B, "block_size": BS, "dtype": dtype}
    sizes |= {"workspace_words": words, "table_stride": WIDTH, "eps": 0.5, "scale": 0.125}
    sizes |= {"num_stages": 4}
    return arguments, sizes | {f"layer_{i}": layer.data_ptr() for i, layer in enumerate(layers)}
