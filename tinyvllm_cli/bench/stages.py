"""The stages of the fused decode step, by the clocks that its CTAs read on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tinyvllm_cli.checkpoint.config import ModelConfig
    from tinyvllm_cli.checkpoint.weights import Weights

WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class StageTime:
    """A stage of a layer, "logits", or "" for all. samples: seconds, a mean over layers; bytes, flops: of one layer."""

    name: str
    samples: list[float]
    bytes: float
    flops: float


def measure_stages(
    config: ModelConfig,
    weights: Weights,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    rope_table: torch.Tensor,
    context: int,
    num_samples: int,
) -> list[StageTime]:
    """Times the stages of `decode_step` for as many rows as the table has; [] where the op does not run.

    A stage lasts from the last output of the stage before it to its own last output, over all CTAs.
    """
    import torch

    from tinyvllm_cli import ops
    from tinyvllm_cli.memory import decode_step

    count, device = block_table.size(0), weights.embed.device
    dtype = str(weights.embed.dtype).removeprefix("torch.")
    supported = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in decode_step.CAPABILITIES
    if not supported or count > decode_step.MAX_ROWS or not decode_step.is_supported(config, dtype):
        return []

    def integers(value: int, size: int = count) -> torch.Tensor:
        return torch.full((size,), value, dtype=torch.int32, device=device)

    workspace = integers(-1, decode_step.workspace_words(config, dtype, count))
    workspace[: decode_step.HEADER_WORDS] = 0
    logits = torch.empty(count, config.vocab_size, device=device)
    rows = torch.arange(count, dtype=torch.int32, device=device)
    num_stages = len(decode_step.STAGES) * config.num_layers + 1
    num_ctas = torch.cuda.get_device_properties(device).multi_processor_count
    samples = []
    for _ in range(WARM_UPS + num_samples):
        times = torch.zeros(num_ctas, num_stages, 2, dtype=torch.int64, device=device)
        ops.decode_step(
            logits,
            integers(0),
            integers(0),
            integers(context - 1),
            integers(0),
            kv_cache,
            workspace,
            weights.embed,
            [t for x in weights.layers for t in (x.attn_norm, x.qkv, x.o, x.mlp_norm, x.gate_up, x.down)],
            weights.final_norm,
            weights.lm_head,
            rope_table,
            rows,
            block_table,
            torch.zeros(count, device=device),
            torch.zeros(count, dtype=torch.int64, device=device),
            config.rms_norm_eps,
            config.head_dim**-0.5,
            times=times,
        )
        started, ended = times[:, 0, 0], times[:, :, 1].amax(dim=0)
        samples.append(torch.cat((started[started > 0].amin().view(1), ended)).cpu())
    lasted = torch.stack(samples[WARM_UPS:]).diff(dim=1) / 1e9  # [samples, stages]
    by_layer = lasted[:, :-1].unflatten(1, (config.num_layers, -1)).mean(dim=1)
    names = (*decode_step.STAGES, "logits", "")
    columns = torch.cat((by_layer, lasted[:, -1:], lasted.sum(dim=1, keepdim=True)), dim=1).T.tolist()
    return [
        StageTime(name, column, *_work(config, name, count, context))
        for name, column in zip(names, columns, strict=True)
    ]


def _work(config: ModelConfig, name: str, rows: int, context: int) -> tuple[float, float]:
    """Bytes and floating-point operations of one layer's stage, of the logits, or of the whole step."""
    c, itemsize = config, 2
    width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    weights = {
        "qkv": (width + 2 * kv_width) * c.hidden_size,
        "attention": 0,
        "o": c.hidden_size * width,
        "gate_up": 2 * c.intermediate_size * c.hidden_size,
        "down": c.hidden_size * c.intermediate_size,
        "logits": c.vocab_size * c.hidden_size,
    }
    if name == "attention":
        return rows * context * 2 * kv_width * itemsize, 4.0 * rows * context * width
    if name:
        return weights[name] * itemsize, 2.0 * rows * weights[name]
    parts = [_work(config, part, rows, context) for part in weights]
    times = [1 if part == "logits" else c.num_layers for part in weights]
    total = [sum(t * part[i] for t, part in zip(times, parts, strict=True)) for i in range(2)]
    return total[0], total[1]
