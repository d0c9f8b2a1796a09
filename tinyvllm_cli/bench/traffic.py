"""The least work of a case: bytes that must move and operations that must be done, and the time that they take at best.

The work has parts (the layers' matrices, the logits' matrix, attention). Each part takes at least its bytes over the
reading
bandwidth, and at least its operations over the matmul rate; the parts follow each other, so their floors add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tinyvllm_cli.bench.workloads import Case, Request
from tinyvllm_cli.checkpoint.names import weights_layout

if TYPE_CHECKING:
    from tinyvllm_cli.checkpoint.config import ModelConfig


class Ceiling(NamedTuple):
    """What this machine does at best: bytes a second (reading), floating-point operations a second (matmul)."""

    bandwidth: float
    flops: float


class Part(NamedTuple):
    nbytes: float
    flops: float


class Work(NamedTuple):
    """The least work, in parts."""

    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> float:
        return sum(part.nbytes for part in self.parts)

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.parts)

    def floor(self, ceiling: Ceiling) -> float:
        """Seconds that it takes at least."""
        return sum(max(part.nbytes / ceiling.bandwidth, part.flops / ceiling.flops) for part in self.parts)

    def is_memory_bound(self, ceiling: Ceiling) -> bool:
        return self.nbytes / ceiling.bandwidth >= self.flops / ceiling.flops


class Model:
    """A model's sizes: bytes of weights, bytes of KV a token, operations a token.

    `itemsize` is that of weights, activations and cache.
    """

    def __init__(self, config: ModelConfig, itemsize: int) -> None:
        slots, _ = weights_layout(config, itemsize)
        self.layer_bytes = sum(slot.nbytes for slot in slots if slot.name.startswith("layers."))
        self.head_bytes = config.vocab_size * config.hidden_size * itemsize
        self.kv_bytes = config.num_layers * config.num_kv_heads * 2 * config.head_dim * itemsize
        self.layer_flops = 2 * self.layer_bytes // itemsize
        self.head_flops = 2 * config.vocab_size * config.hidden_size
        # Scores and their product with the values: 2 x 2 x head_dim a head for each token attended to.
        self.attention_flops = 4 * config.num_layers * config.num_heads * config.head_dim

    def prefill(self, batch: int, tokens: int, depth: int = 0, steps: int = 1) -> Work:
        """`batch` prompts of `tokens` tokens behind `depth` cached ones, in `steps` steps."""
        pairs = batch * (tokens * depth + tokens * (tokens + 1) / 2)
        return Work(
            (
                Part(steps * self.layer_bytes, batch * tokens * self.layer_flops),
                Part(self.head_bytes, batch * self.head_flops),
                Part(batch * (depth + tokens) * self.kv_bytes, pairs * self.attention_flops),
            )
        )

    def decode(self, batch: int, context: int, steps: int) -> Work:
        """`steps` decode steps of `batch` sequences that have `context` tokens before them."""
        pairs = batch * (steps * context + steps * (steps + 1) / 2)
        return Work(
            (
                Part(steps * self.layer_bytes, steps * batch * self.layer_flops),
                Part(steps * self.head_bytes, steps * batch * self.head_flops),
                Part(pairs * self.kv_bytes, pairs * self.attention_flops),
            )
        )

    def job(self, requests: tuple[Request, ...], max_num_seqs: int, common: int = 0) -> Work:
        """A job whose prompts are prefilled for themselves and whose tokens come in as few decode steps as can be.

        The first `common` tokens are those of one prompt, and found in the cache by the others.
        """
        decoded = [r.generated_tokens - 1 for r in requests]
        steps = max(*decoded, -(-sum(decoded) // max_num_seqs), 0)
        work = self.decode(1, 0, steps)
        parts = [
            Part(work.parts[0].nbytes, sum(decoded) * self.layer_flops),
            Part(work.parts[1].nbytes, sum(decoded) * self.head_flops),
        ]
        if common:
            prefill = self.prefill(1, common, steps=0)
            parts += [prefill.parts[0], prefill.parts[2]]
        for request, n in zip(requests, decoded, strict=True):
            prefill = self.prefill(1, request.prompt_tokens - common, common, steps=0)
            parts += [prefill.parts[0], Part(0, self.head_flops), prefill.parts[2]]
            parts.append(self.decode(1, request.prompt_tokens, n).parts[2])
        return Work(tuple(parts))

    def of(self, case: Case, prefix_cache: bool = False) -> Work:
        if case.workload is not None:
            common = case.workload.common_tokens if prefix_cache else 0
            return self.job(case.workload.requests, case.batch, common)
        if case.test == "prefill":
            return self.prefill(case.batch, case.prompt_tokens, case.depth)
        return self.decode(case.batch, case.depth + case.prompt_tokens, case.generated_tokens)
