"""Contexts as long as the model was made for: 131,072 tokens, without computing them all.

The engine is told that all tokens of a prompt but the last ones are computed already, and the KV cache has random
content in their place, sharp enough that each answer hangs on a few tokens anywhere. The oracle is `transformers` with
the same cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch

from tinyvllm_cli.engine.sequence import SamplingParams, Sequence
from tinyvllm_cli.llm import LLM

LONGEST = 131072
TAIL = 9  # tokens of a prompt that are computed
ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHAPE: dict[str, Any] = {
    "layers": 1,
    "heads": 4,
    "kv_heads": 1,
    "max_position": LONGEST,
    "rope_theta": 500000.0,
    "rope_scaling": ROPE | {"original_max_position_embeddings": 8192},
}


def logits_of(folder: Path, cached: torch.Tensor, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Logits behind the last of ids, which follow cached [layers, K, 2, tokens, D]; by `transformers`, fp32."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    cache = DynamicCache()
    for i, layer in enumerate(cached.to(dtype)):
        cache.update(layer[None, :, 0], layer[None, :, 1], i)
    start = cached.size(3)
    with torch.inference_mode():
        positions = torch.arange(start, start + len(ids))[None]
        output = model(torch.tensor([ids]), past_key_values=cache, position_ids=positions)
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits


def test_decode_up_to_the_last_position(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that ends TAIL tokens before the last position; its answer fills the context to there."""
    folder = models.write_rand(tmp_path, dtype="bfloat16", **SHAPE)
    llm = LLM(folder, device=device, max_num_seqs=2, num_kv_blocks=LONGEST // 16 + 1)
    llm.runner.kv_cache.normal_(generator=torch.Generator(device).manual_seed(1))
    llm.runner.kv_cache[:, :, :, 0] *= 8
    cache = llm.runner.kv_cache.float().cpu()
    scheduler, start = llm.engine.scheduler, LONGEST - 2 * TAIL
    admit, blocks = scheduler._admit, []

    def admit_computed(sequence: Sequence, *beginning: Any) -> None:
        admit(sequence, *beginning)
        scheduler._num_computed[sequence.row] = start
        blocks.extend(scheduler._table[sequence.row, : -(-start // 16)].tolist())

    monkeypatch.setattr(scheduler, "_admit", admit_computed)
    prompt = torch.randint(256, (start + TAIL,), generator=torch.Generator().manual_seed(2)).tolist()
    sequence = llm.engine.add(prompt, SamplingParams(max_tokens=LONGEST, ignore_eos=True))
    steps = 0
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
    assert len(sequence.output_token_ids) == TAIL
    assert steps < 2 * TAIL  # one prefill step, and none for what is computed already
    ids = prompt[start:] + sequence.output_token_ids[:-1]
    cached = cache[:, blocks].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :start]
    exact = logits_of(folder, cached, ids, torch.float32)
    error = float((llm.runner.buffers["logits"][0].cpu() - exact).abs().max())
    allowed = 1e-3
    if device == "cuda":
        allowed = 2 * float((logits_of(folder, cached, ids, torch.bfloat16) - exact).abs().max())
    assert error <= allowed, f"error {error:.4f}, allowed {allowed:.4f}"
