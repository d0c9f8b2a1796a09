"""The workspace of the op `decode_step`, and what its error words say: as `cuda_ext/decode_step.cuh` lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinyvllm_cli.checkpoint.config import ModelConfig

CAPABILITIES = (9, 10)
"""Major compute capabilities of the cards that have both bulk copies and shared memory enough."""
MAX_ROWS, MAX_LAYERS, MAX_HIDDEN, MAX_BLOCK_SIZE = 8, 64, 4096, 4096
HEADER_WORDS = 64 + 8 * 256 * 4
"""A header, and a summary of each of 256 segments of 8 rows of logits."""
ERROR_WORDS = slice(4, 8)
TOLD_WORDS, TOLD_STEPS = slice(8, 10), 4
"""Where the address of int32 [TOLD_STEPS, MAX_ROWS] in pinned host memory may stand: step s, counted from zeros of the
header, writes its tokens to row s % TOLD_STEPS, so that no copy stands between steps."""
EXPECTED_CTAS, MAX_SPLITS = 132, 16
STAGES = ("qkv", "attention", "o", "gate_up", "down")
"""Of a layer. The logits count as qkv of the layer behind the last."""


def is_supported(config: ModelConfig, dtype: str) -> bool:
    """Whether the op takes models of this shape, at an activation dtype of `memory.plan`."""
    return (
        dtype in ("bfloat16", "float16")
        and config.num_layers <= MAX_LAYERS
        and config.hidden_size <= MAX_HIDDEN
        and config.hidden_size % 8 == 0
        and config.intermediate_size % 8 == 0
        and config.head_dim in (64, 128)
    )


def exchange_offsets(config: ModelConfig, num_rows: int) -> dict[str, int]:
    """Where in a layer's part of a set each stage's results lie, in 4-byte words; "layer" is the length of the part.

    "qkv" [rows, (Q + 2K) D], "parts" of split contexts [splits, rows, Q, D + 8], "attention" [rows, Q D], "middle"
    [rows, H] is the residual stream behind o, "activation" [rows, I], "hidden" [rows, H] that behind down.
    """
    q, k, d = config.num_heads, config.num_kv_heads, config.head_dim
    splits = max(1, min(MAX_SPLITS, EXPECTED_CTAS // (num_rows * k)))
    sizes = {
        "qkv": num_rows * (q + 2 * k) * d // 2,
        "parts": splits * num_rows * q * (d // 2 + 4) if splits > 1 else 0,
        "attention": num_rows * q * d // 2,
        "middle": num_rows * config.hidden_size // 2,
        "activation": num_rows * config.intermediate_size // 2,
        "hidden": num_rows * config.hidden_size // 2,
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // 32) * 32
    return offsets | {"layer": end}


def workspace_words(config: ModelConfig, dtype: str, max_rows: int) -> int:
    """int32 words that batches of up to `max_rows` need: HEADER_WORDS and two sets; the former alone if unsupported."""
    if not is_supported(config, dtype):
        return HEADER_WORDS
    batches = range(1, min(max_rows, MAX_ROWS) + 1)
    return HEADER_WORDS + 2 * config.num_layers * max(exchange_offsets(config, n)["layer"] for n in batches)


def describe_error(words: Sequence[int]) -> str | None:
    """What the error words tell; None if all went well."""
    number, cta, warp, _ = words
    layer, stage = divmod(number - 1, len(STAGES))
    return f"{STAGES[stage]} of layer {layer}, CTA {cta}, warp {warp}" if number else None
