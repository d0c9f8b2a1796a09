"""The buffers of jmaczan/tiny-vllm (commit e25bf19), to the byte, from its constants: what ours are measured against.

It is compiled for Llama 3.2 1B, prompts of 512 tokens, two sequences of 2,048, blocks of 16 tokens. Its block belongs
to one layer; ours holds K and V of all layers, so one of ours is as large as 16 of its.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinyvllm_cli.memory.plan import Limits

MAX_PROMPT_LEN, BATCH_SIZE, MAX_SEQ_LEN, BLOCK_SIZE = 512, 2, 2048, 16
MAX_BUFFER_SIZE = max(MAX_PROMPT_LEN, BATCH_SIZE)
HIDDEN, KV_WIDTH, INNER, VOCAB, HEADS = 2048, 512, 8192, 128256, 32
SHAPE = "Llama-3.2-1B"
KV_CACHE_BYTES = 2 * 2**30
KV_BLOCK_BYTES = 2 * BLOCK_SIZE * KV_WIDTH * 2
LIMITS = Limits(BATCH_SIZE, MAX_PROMPT_LEN, MAX_SEQ_LEN, BLOCK_SIZE)
"""The same limits for our plan."""


@dataclass(frozen=True, slots=True)
class PresetBuffer:
    """A buffer of `count` elements of `itemsize` bytes; `roles`: what it holds in turn; on_host: not on the device."""

    name: str
    formula: str
    count: int
    itemsize: int
    roles: tuple[str, ...]
    on_host: bool = False

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize


def buffers() -> tuple[PresetBuffer, ...]:
    """All sixteen, in the order of its source."""
    prompt, rows, batch = MAX_PROMPT_LEN, MAX_BUFFER_SIZE, BATCH_SIZE
    hidden, logits = f"MAX_BUFFER_SIZE x {HIDDEN} x 2", f"MAX_BUFFER_SIZE x {VOCAB} x 2"
    inner, kv = f"MAX_BUFFER_SIZE x {INNER} x 2", f"MAX_PROMPT_LEN x {KV_WIDTH} x 2"
    decode_kv = f"BATCH_SIZE x {KV_WIDTH} x 2"
    return (
        PresetBuffer("gpu_input_tokens", "MAX_PROMPT_LEN x int32", prompt, 4, ("prompt token ids",)),
        PresetBuffer("input_embeddings", f"MAX_PROMPT_LEN x {HIDDEN} x 2", prompt * HIDDEN, 2, ("prompt embeddings",)),
        PresetBuffer("hidden_state", hidden, rows * HIDDEN, 2, ("residual stream",)),
        PresetBuffer("rms_norms", hidden, rows * HIDDEN, 2, ("RMSNorm output",)),
        PresetBuffer("buf_2048_1", hidden, rows * HIDDEN, 2, ("q_proj", "attention output")),
        PresetBuffer("k_proj_temp_buf", kv, prompt * KV_WIDTH, 2, ("prefill K",)),
        PresetBuffer("v_proj_temp_buf", kv, prompt * KV_WIDTH, 2, ("prefill V",)),
        PresetBuffer("prefill_attn_scores", f"MAX_PROMPT_LEN^2 x {HEADS} x 2", prompt**2 * HEADS, 2, ("scores",)),
        PresetBuffer("buf_2048_2", hidden, rows * HIDDEN, 2, ("o_proj", "down_proj")),
        PresetBuffer("gate", inner, rows * INNER, 2, ("SwiGLU gate",)),
        PresetBuffer("up", inner, rows * INNER, 2, ("SwiGLU up",)),
        PresetBuffer("embed_proj", logits, rows * VOCAB, 2, ("logits",)),
        PresetBuffer("embed_proj_cpu", logits, rows * VOCAB, 2, ("logits for the CPU's argmax",), on_host=True),
        PresetBuffer("gpu_last_tokens", "BATCH_SIZE x int32", batch, 4, ("last token per slot",)),
        PresetBuffer("k_proj_batched_buffer", decode_kv, batch * KV_WIDTH, 2, ("decode K",)),
        PresetBuffer("v_proj_batched_buffer", decode_kv, batch * KV_WIDTH, 2, ("decode V",)),
    )
