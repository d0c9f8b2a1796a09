"""The memory plan: every buffer of a runner with size formula, lifetime and neighbours in memory, and the KV cache.

One source of truth: `inspect` prints this plan and the runner allocates exactly it. Activation buffers live in one
arena. Each is live during some intervals of a step's stages; two buffers share memory when they are never live
together, which `plan_buffers` decides from the lifetimes, and a test verifies by poisoning whatever the plan calls
dead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tinyvllm_cli.errors import UserError
from tinyvllm_cli.memory.decode_step import workspace_words

if TYPE_CHECKING:
    from tinyvllm_cli.checkpoint.config import ModelConfig

STAGES = (
    "embedding",
    "attn_norm",
    "qkv",
    "attention",
    "o",
    "mlp_norm",
    "gate_up",
    "silu_mul",
    "down",
    "final_norm",
    "logits",
    "sample",
)
"""The stages of a step in order; "attn_norm" to "down" are repeated for each layer."""

ALIGNMENT = 256
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
SAMPLE_WORKSPACE_FLOATS = 4096
"""Scratch of the sampling kernel for one row of logits."""
LOGPROB_COLUMNS = 21
"""The sampled token and the 20 most probable ones."""
DECODE_CTAS = 132
"""CTAs of decode attention that share a batch's contexts: one for each of an H200's SMs, or two if it is small."""
MAX_SPLITS = 64
CUDA_BATCHED_TOKENS = 8448
"""8,192 tokens of prompts and the decodes of 256 sequences: so 256 prompts of 128 tokens, of which the first ones
decode while the last ones are prefilled, take 4 steps, and no fifth one for the few tokens that decodes displaced."""
NORM_ROWS = 256
"""Tokens of a step up to which norms may be done by the products between them."""
MAX_COUNT = 2**31 - 1
"""The kernels count in 32 bits."""

Interval = tuple[str, str]
ALWAYS: tuple[Interval, ...] = ((STAGES[0], STAGES[-1]),)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a runner is sized for: sequences at once, tokens a step, tokens a sequence, tokens a KV block."""

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batched_tokens", "max_model_len", "block_size"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_COUNT:
                option = "--" + name.replace("_", "-")
                raise UserError(f"{value} is out of range", where=option, fix=f"Give a number from 1 to {MAX_COUNT:,}.")
        if self.max_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"--max-batched-tokens {self.max_batched_tokens} is smaller than --max-num-seqs {self.max_num_seqs}",
                fix="Each running sequence needs one token a step: raise the first or lower the second.",
            )

    @property
    def blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer: `shape` in elements of `dtype`, `offset` in the arena, `live` as closed intervals of stages."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    formula: str
    role: str
    live: tuple[Interval, ...]
    offset: int = 0
    alias_of: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        size = ITEMSIZE[self.dtype]
        for dim in self.shape:
            size *= dim
        return size

    def is_live(self, stage: str) -> bool:
        at = STAGES.index(stage)
        return any(STAGES.index(first) <= at <= STAGES.index(last) for first, last in self.live)

    def is_needed_after(self, stage: str) -> bool:
        """Whether what the buffer holds when `stage` ends is still read by a later stage."""
        at = STAGES.index(stage)
        return any(STAGES.index(first) <= at < STAGES.index(last) for first, last in self.live)


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """All buffers with their places in one arena of `total_bytes`."""

    buffers: tuple[Buffer, ...]
    total_bytes: int

    def __getitem__(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The KV cache: `num_blocks` blocks, each of `block_size` tokens for all layers, `block_bytes` long."""

    num_blocks: int
    block_size: int
    block_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


def default_limits(
    config: ModelConfig,
    cuda: bool,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    max_batched_tokens: int | None = None,
    block_size: int = 16,
) -> Limits:
    """The limits asked for; the others as is usual for the device, max_model_len as the model was made for."""
    longest = config.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise UserError(
            f"{max_model_len} tokens are more than the {longest} that the model was made for",
            where="--max-model-len",
            fix=f"Give at most {longest} (max_position_embeddings in config.json).",
        )
    num_seqs, num_tokens = max_num_seqs, max_batched_tokens
    if num_seqs is None:
        num_seqs = min(256 if cuda else 32, num_tokens or 256)
    if num_tokens is None:
        num_tokens = max(CUDA_BATCHED_TOKENS if cuda else 1024, num_seqs)
    return Limits(num_seqs, num_tokens, max_model_len if max_model_len is not None else longest, block_size)


def decode_splits(num_seqs: int, num_kv_heads: int) -> int:
    """`num_splits` of `attention_decode`: equal contexts are cut into parts that fill the card, uneven ones finer.

    The kernel makes at most num_seqs * num_splits parts: up to (num_splits - 1) / 2 of each of equal contexts, and of
    uneven ones twice as many and one more for each sequence. 1 would cut none, however uneven they are.
    """
    ctas = DECODE_CTAS if num_seqs > 8 else 2 * DECODE_CTAS
    return 1 + 2 * max(1, min(MAX_SPLITS, ctas // (num_seqs * num_kv_heads)))


def plan_buffers(config: ModelConfig, limits: Limits, dtype: str) -> BufferPlan:
    """Sizes every buffer of a runner and places it; `dtype` is that of activations ("bfloat16", "float16", "float32").

    In the formulas T is max_batched_tokens, S max_num_seqs, H hidden_size, I intermediate_size, V vocab_size, D
    head_dim,
    Q and K the numbers of query and key/value heads.
    """
    t, s, h = limits.max_batched_tokens, limits.max_num_seqs, config.hidden_size
    q, k, d = config.num_heads, config.num_kv_heads, config.head_dim
    i, v = config.intermediate_size, config.vocab_size
    parts = max(n * decode_splits(n, k) for n in {*range(1, min(s, DECODE_CTAS) + 1), s})  # beyond: as n grows
    twice = (("attn_norm", "qkv"), ("mlp_norm", "gate_up"), ("final_norm", "logits"))
    proj = (("attn_norm", "attn_norm"), ("o", "mlp_norm"), ("down", "final_norm"))
    blocks, padded = limits.blocks_per_seq, _align(4 * s) // 4
    buffers = (
        Buffer("hidden", (t, h), dtype, "T x H", "residual stream", (("embedding", "final_norm"),)),
        Buffer("normed", (t, h), dtype, "T x H", "RMSNorm output", twice),
        Buffer("qkv", (t, (q + 2 * k) * d), dtype, "T x (Q + 2K) x D", "queries, keys, values",
               (("qkv", "attention"),)),
        Buffer("attention", (t, q * d), dtype, "T x Q x D", "attention output", (("attention", "o"),)),
        Buffer("projection", (t, h), dtype, "T x H", "output of o, then of down", proj),
        Buffer("gate_up", (t, 2 * i), dtype, "T x 2I", "gate and up projections", (("gate_up", "silu_mul"),)),
        Buffer("activation", (t, i), dtype, "T x I", "SiLU(gate) x up", (("gate_up", "down"),)),
        Buffer("sample_hidden", (s, h), dtype, "S x H", "rows that need logits", (("final_norm", "logits"),)),
        Buffer("logits", (s, v), "float32", "S x V", "logits of the sampled rows", (("logits", "sample"),)),
        Buffer("attention_parts", (parts, 8), "int32", "max over n of n x splits(n) x 8",
               "what decode attention makes of the contexts", (("embedding", "final_norm"),)),
        Buffer("attention_partials", (4 + parts * q * (d + 4),), "float32",
               "4 + max over n of n x Q x splits(n) x (D + 4)", "a queue, results of parts of contexts", ALWAYS),
        Buffer("sample_workspace", (s, SAMPLE_WORKSPACE_FLOATS), "float32", f"S x {SAMPLE_WORKSPACE_FLOATS}",
               "partial results of sampling", (("sample", "sample"),)),
        Buffer("sample_counters", (s,), "int32", "S", "arrivals at a split vocabulary", ALWAYS),
        Buffer("row_words", (3, _align(8 * max(s, NORM_ROWS)) // 8), "int64",
               f"3 x ceil(max(S, {NORM_ROWS}) / 32) x 32",
               "largest logit of each greedy row so far; sums of squares of norms", ALWAYS),
        Buffer("decode_exchange", (workspace_words(config, dtype, s),), "int32", "see memory/decode_step.py",
               "what the stages of the fused decode step pass on", ALWAYS),
        Buffer("step_inputs", (3 * t + 8 * s + 64,), "int32", "3T + 8S + 64",
               "token ids, positions, slots, rows, lengths of a step", ALWAYS),
        Buffer("decode_state", (6, padded), "int32", "6 x ceil(S / 64) x 64",
               "rows, positions and tokens of a captured decode step", ALWAYS),
        Buffer("sampling_params", (10, padded), "int32", "10 x ceil(S / 64) x 64",
               "temperature, top-k, top-p, min-p, penalties, seed per row", ALWAYS),
        Buffer("token_counts", (s, v), "int32", "S x V", "tokens that rows with penalties have", ALWAYS),
        Buffer("logprob_values", (s, LOGPROB_COLUMNS), "float32", f"S x {LOGPROB_COLUMNS}",
               "log-probabilities of sampled and best tokens", ALWAYS),
        Buffer("logprob_ids", (s, LOGPROB_COLUMNS), "int32", f"S x {LOGPROB_COLUMNS}", "their tokens", ALWAYS),
        Buffer("block_table", (s, blocks), "int32", "S x ceil(max_model_len / block_size)",
               "KV blocks of each row", ALWAYS),
        Buffer("rope_table", (limits.max_model_len, d), "float32", "max_model_len x D", "cosines and sines", ALWAYS),
    )  # fmt: skip
    return _place(buffers)


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one KV block: layers x KV heads x (K and V) x block_size x head_dim x itemsize."""
    return config.num_layers * config.num_kv_heads * 2 * block_size * config.head_dim * ITEMSIZE[dtype]


def plan_kv_cache(config: ModelConfig, limits: Limits, dtype: str, memory_bytes: int) -> KVPlan:
    """As many blocks as fit `memory_bytes`, but no more than max_num_seqs sequences of max_model_len can use.

    Raises UserError when not even one block fits.
    """
    block_bytes = kv_block_bytes(config, limits.block_size, dtype)
    num_blocks = min(max(memory_bytes, 0) // block_bytes, limits.max_num_seqs * limits.blocks_per_seq)
    if num_blocks < 1:
        raise UserError(
            f"no memory for the KV cache: {_mib(max(memory_bytes, 0))} MiB are left for it, and one block of "
            f"{limits.block_size} tokens needs {_mib(block_bytes)} MiB",
            fix="Lower --max-batched-tokens or --max-num-seqs, raise --memory-fraction or --kv-cache-memory, "
            "or free memory on the device.",
        )
    return KVPlan(num_blocks, limits.block_size, block_bytes)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.2f}"


def _place(buffers: tuple[Buffer, ...]) -> BufferPlan:
    """First fit by falling size: each buffer takes the lowest offset that is free whenever it is live."""
    live = {buffer.name: {stage for stage in STAGES if buffer.is_live(stage)} for buffer in buffers}
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: -b.nbytes):
        offset = 0
        meeting = [p for p in placed if live[p.name] & live[buffer.name]]
        for other in sorted(meeting, key=lambda p: p.offset):
            if offset + buffer.nbytes <= other.offset:
                break
            offset = max(offset, _align(other.offset + other.nbytes))
        placed.append(replace(buffer, offset=offset))
    named = {p.name: p for p in placed}
    result = []
    for buffer in buffers:
        p = named[buffer.name]
        shares = tuple(
            o.name for o in placed if o is not p and o.offset < p.offset + p.nbytes and p.offset < o.offset + o.nbytes
        )
        result.append(replace(p, alias_of=shares))
    return BufferPlan(tuple(result), max(_align(p.offset + p.nbytes) for p in placed))


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
