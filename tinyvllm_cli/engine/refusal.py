"""Which requests can never run, however long they wait: they are refused with the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinyvllm_cli.errors import UserError

if TYPE_CHECKING:
    from tinyvllm_cli.engine.blocks import BlockPool
    from tinyvllm_cli.memory.plan import Limits


def allowed_outputs(prompt: int, max_tokens: int, limits: Limits, pool: BlockPool) -> int:
    """How many tokens a prompt of `prompt` tokens may generate of `max_tokens`. UserError when it can never run."""
    longest = limits.max_model_len
    if prompt == 0:
        raise UserError("the prompt has no tokens", fix="Give at least one token.")
    if prompt >= longest:
        raise UserError(
            f"the prompt has {prompt} tokens; with max_model_len {longest} it may have at most {longest - 1}",
            fix="Shorten the prompt, or raise --max-model-len.",
        )
    outputs = min(max_tokens, longest - prompt)
    stored = prompt + outputs - 1  # K and V of the last token are never needed
    needed, available = pool.blocks_for(stored), pool.num_blocks
    if needed > available:
        raise UserError(
            f"a prompt of {prompt} tokens and up to {outputs} new ones need {needed} KV-cache blocks "
            f"of {pool.block_size} tokens; {available} are available",
            fix="Lower --max-tokens or --max-model-len, shorten the prompt, or give the KV cache more memory "
            "(--kv-cache-memory, --memory-fraction).",
        )
    return outputs
