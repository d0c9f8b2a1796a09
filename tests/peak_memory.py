"""Predicted against measured memory on this machine's GPU: what `inspect` says, then what LLM really takes.

    PYTHONPATH=. python tests/peak_memory.py [SHAPE] [BYTES OF KV CACHE]

SHAPE is one of bench's, with random weights; default Llama-3.2-1B, the cache as large as fits. Exit code 1 when the
peak that torch has reserved differs from the prediction by 3% or more.
"""

from __future__ import annotations

import os
import sys

from tinyvllm_cli.bench.shapes import find_shape
from tinyvllm_cli.checkpoint.names import weights_layout
from tinyvllm_cli.memory.budget import MemoryPlan, pick_dtype, plan_memory
from tinyvllm_cli.memory.gpu import find_gpu
from tinyvllm_cli.memory.plan import ITEMSIZE, default_limits


def predict(shape: str, cache: int | None) -> MemoryPlan:
    """As `inspect` does, before anything has touched the GPU."""
    _, config = find_shape(shape)
    card = find_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if card is None:
        sys.exit("no GPU is here")
    dtype = pick_dtype(config.dtype, cuda=True)
    weights_bytes = weights_layout(config, ITEMSIZE[dtype])[1]
    return plan_memory(config, default_limits(config, True), dtype, card, weights_bytes, kv_cache_memory=cache)


def main() -> int:
    shape = sys.argv[1] if len(sys.argv) > 1 else "Llama-3.2-1B"
    cache = int(sys.argv[2]) if len(sys.argv) > 2 else None
    plan = predict(shape, cache)

    import torch

    from tinyvllm_cli.engine.sequence import SamplingParams
    from tinyvllm_cli.llm import LLM

    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    context = (plan.device.free_bytes or 0) - free
    llm = LLM(find_shape(shape)[1], device="cuda", kv_cache_memory=cache)
    for batch, length in ((1, 100), (8, 300), (64, 1000), (256, 200)):
        for _ in range(batch):
            llm.engine.add([11] * length, SamplingParams(max_tokens=40, ignore_eos=True))
        while llm.engine.has_work:
            llm.engine.step()
    peak = torch.cuda.max_memory_reserved()
    kv, predicted = llm.kv_plan, plan.allocated_bytes
    rows = [
        ("total", plan.device.total_bytes or 0, total),
        ("context and a first tensor", plan.context_bytes, context),
        ("weights", plan.weights_bytes, llm.runner.model.weights.arena.nbytes),
        ("buffers", plan.buffers.total_bytes, llm.runner.arena.nbytes),
        ("KV cache", plan.kv.total_bytes if plan.kv else 0, kv.total_bytes),
        ("allocated, peak reserved", predicted, peak),
        ("graphs and libraries", plan.reserve_bytes, peak - kv.total_bytes - llm.plan.total_bytes - plan.weights_bytes),
        ("free at the end", 0, torch.cuda.mem_get_info()[0]),
    ]
    print(f"{plan.device.name}, {shape}, {plan.dtype}")
    print(f"{'':28}{'predicted MiB':>16}{'measured MiB':>16}")
    for name, expected, found in rows:
        print(f"{name:28}{expected / 2**20:16,.1f}{found / 2**20:16,.1f}")
    error = abs(peak - predicted) / peak
    print(f"difference of the peak: {100 * error:.2f}%")
    return int(error >= 0.03)


if __name__ == "__main__":
    sys.exit(main())
