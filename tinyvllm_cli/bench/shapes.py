"""Shapes of known models, for random weights: a benchmark needs no checkpoint."""

from __future__ import annotations

from pathlib import Path

from tinyvllm_cli.checkpoint.config import ModelConfig, RopeConfig, read_config
from tinyvllm_cli.errors import ExitCode, UserError


def _llama3(hidden: int, layers: int, heads: int, inner: int, *, factor: float, tied: bool) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=hidden // heads,
        intermediate_size=inner,
        vocab_size=128256,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500000.0, "llama3", factor, 1.0, 4.0, 8192),
        max_position_embeddings=131072,
        tie_word_embeddings=tied,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
        dtype="bfloat16",
    )


def _smollm2(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, theta: float) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        intermediate_size=inner,
        vocab_size=49152,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="bfloat16",
    )


SHAPES = {
    "Llama-3.2-1B": _llama3(2048, 16, 32, 8192, factor=32.0, tied=True),
    "Llama-3.2-3B": _llama3(3072, 28, 24, 8192, factor=32.0, tied=True),
    "Llama-3.1-8B": _llama3(4096, 32, 32, 14336, factor=8.0, tied=False),
    "SmolLM2-135M": _smollm2(576, 30, 9, 3, 1536, 100000.0),
    "SmolLM2-360M": _smollm2(960, 32, 15, 5, 2560, 100000.0),
    "SmolLM2-1.7B": _smollm2(2048, 24, 32, 32, 8192, 130000.0),
}
SHORT_NAMES = {"1B": "Llama-3.2-1B", "3B": "Llama-3.2-3B", "8B": "Llama-3.1-8B"}


def find_shape(name: str) -> tuple[str, ModelConfig]:
    """The full name and the configuration of a shape: a known name in any case, or the path of a config.json."""
    known = {key.lower(): key for key in SHAPES} | {short.lower(): key for short, key in SHORT_NAMES.items()}
    if name.lower() in known:
        key = known[name.lower()]
        return key, SHAPES[key]
    path = Path(name)
    if path.is_file() and path.name == "config.json":
        return f"{path.resolve().parent.name}/config.json", read_config(path.parent)
    raise UserError(
        f"no shape {name!r} is known",
        where="--shape",
        fix=f"Give the path of a config.json, or one of {', '.join([*SHORT_NAMES, *SHAPES])}.",
        exit_code=ExitCode.USAGE,
    )
