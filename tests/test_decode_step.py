"""The fused decode step against the single ops: logits, K and V, and what each of its stages passes on.

On the CPU the op is the reference; on CUDA it is the kernel, and the single ops run on the CPU on copies of its input.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from program import tinyvllm
from torch import Tensor

from tinyvllm_cli import ops
from tinyvllm_cli.bench.stages import measure_stages
from tinyvllm_cli.checkpoint.config import ModelConfig
from tinyvllm_cli.checkpoint.weights import Weights
from tinyvllm_cli.memory import decode_step
from tinyvllm_cli.memory.plan import SAMPLE_WORKSPACE_FLOATS, Limits, plan_buffers
from tinyvllm_cli.model.decode_share import DecodeShare
from tinyvllm_cli.model.dummy import random_weights
from tinyvllm_cli.model.llama import Batch, Llama
from tinyvllm_cli.model.rope import rope_table

EPS = 1e-5
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 1e-4}
SIZES = {
    "even": ModelConfig(256, 2, 8, 2, 64, 640, 300, EPS),
    "wide heads": ModelConfig(512, 2, 6, 2, 128, 1024, 257, EPS),
    "odd sizes": ModelConfig(200, 2, 3, 1, 64, 264, 77, EPS),
    "whole chunks": ModelConfig(512, 1, 8, 2, 64, 512, 260, EPS),
    "whole strips": ModelConfig(2048, 1, 32, 8, 64, 4096, 300, EPS),
    "many heads": ModelConfig(128, 1, 16, 1, 64, 192, 72, EPS),
    "long rows": ModelConfig(2304, 1, 36, 4, 64, 9000, 1000, EPS),
}


def flat(weights: Weights) -> list[Tensor]:
    return [t for x in weights.layers for t in (x.attn_norm, x.qkv, x.o, x.mlp_norm, x.gate_up, x.down)]


@dataclass
class Step:
    """A model, a paged cache of random history, and a batch at given context lengths; 0 is padding."""

    config: ModelConfig
    weights: Weights
    inputs: dict[str, Tensor]
    kv_cache: Tensor
    rope: Tensor
    block_size: int

    @classmethod
    def make(
        cls, config: ModelConfig, lengths: list[int], dtype: torch.dtype, device: str, block_size: int = 16
    ) -> Step:
        weights = random_weights(config, dtype=dtype, device=torch.device("cpu"))
        for matrix in flat(weights):
            matrix.mul_(1 if matrix.dim() == 1 else 2.5)
        weights = Weights(
            weights.embed.mul_(50).to(device),
            [type(x)(**{n: getattr(x, n).to(device).contiguous() for n in x.__slots__}) for x in weights.layers],
            weights.final_norm.to(device),
            weights.lm_head.to(device),
            weights.arena,
        )
        g = torch.Generator().manual_seed(len(lengths))
        count, columns = len(lengths), -(-max(lengths) // block_size)
        table = torch.randperm(count * columns + 3, generator=g)[: count * columns].view(count, columns).int()
        rows = torch.randperm(count, generator=g).int()
        lens = torch.tensor(lengths, dtype=torch.int32)
        positions = (lens - 1).clamp_min(0)
        slots = table[rows.long(), (positions // block_size).long()] * block_size + positions % block_size
        real = lens > 0
        token_ids = torch.randint(0, config.vocab_size, (count,), generator=g, dtype=torch.int32)
        inputs = {
            "token_ids": torch.where(real, token_ids, 0),
            "positions": positions,
            "slots": torch.where(real, slots, -1).int(),
            "context_lens": lens,
            "rows": torch.where(real, rows, -1).int(),
            "block_table": table,
        }
        shape = (config.num_layers, table.numel() + 3, config.num_kv_heads, 2, block_size, config.head_dim)
        rope = torch.empty(max(lengths) + 1, config.head_dim)
        rope_table(rope, config.rope, config.head_dim)
        return cls(
            config,
            weights,
            {name: t.to(device) for name, t in inputs.items()},
            torch.randn(shape, generator=g).to(dtype).to(device),
            rope.to(device),
            block_size,
        )

    def workspace(self) -> Tensor:
        dtype = str(self.weights.embed.dtype).removeprefix("torch.")
        words = torch.full((decode_step.workspace_words(self.config, dtype, 8),), -1, dtype=torch.int32)
        words[: decode_step.HEADER_WORDS] = 0
        return words.to(self.weights.embed.device)

    def run(
        self,
        workspace: Tensor,
        samples: bool = True,
        num_stages: int = -1,
        times: Tensor | None = None,
        temperatures: Tensor | None = None,
    ) -> Tensor:
        """The logits; NaN where none were written. Checks what becomes of the decode state."""
        w, i = self.weights, self.inputs
        logits = torch.full((len(i["rows"]), self.config.vocab_size), torch.nan, device=w.embed.device)
        real = i["rows"] >= 0
        last_tokens = torch.full((len(i["block_table"]),), -7, dtype=torch.int32, device=w.embed.device)
        last_tokens[i["rows"][real]] = i["token_ids"][real]
        before, next_positions = last_tokens.clone(), i["positions"].clone()
        told = torch.full((decode_step.TOLD_STEPS, decode_step.MAX_ROWS), -7, dtype=torch.int32)
        if told_by_kernel := w.embed.device.type == "cuda":
            told = told.pin_memory()
            workspace[decode_step.TOLD_WORDS].view(torch.int64).fill_(told.data_ptr())
            row = told[int(workspace[0]) % len(told)]
        sampled, context_lens = torch.full_like(i["rows"], -7), torch.full_like(i["rows"], -7)
        temperature = torch.zeros(len(last_tokens), device=w.embed.device) if temperatures is None else temperatures
        seeds = torch.arange(len(last_tokens), device=w.embed.device) + (1 << 40)
        ops.decode_step(
            logits,
            sampled,
            last_tokens,
            next_positions,
            context_lens,
            self.kv_cache,
            workspace,
            w.embed,
            flat(w),
            w.final_norm,
            w.lm_head,
            self.rope,
            i["rows"],
            i["block_table"],
            temperature if samples else None,
            seeds if samples else None,
            EPS,
            self.config.head_dim**-0.5,
            num_stages,
            times,
        )
        assert torch.equal(context_lens, i["context_lens"])
        assert torch.equal(next_positions[real], i["context_lens"][real])
        if samples and num_stages < 0:
            none = torch.zeros_like(temperature)
            scratch = torch.zeros(len(sampled), SAMPLE_WORKSPACE_FLOATS, device=sampled.device)
            parameters = (temperature, none.int(), none + 1, none, seeds, scratch, torch.zeros_like(sampled))
            expected = torch.empty_like(sampled)
            ops.sample(expected, before, logits, i["rows"], context_lens, *parameters)
            assert torch.equal(sampled, expected)
        assert samples or (sampled == -7).all()
        if told_by_kernel:
            assert torch.equal(row[: len(sampled)], sampled.cpu())
            assert (told == -7).sum() >= told.numel() - len(sampled)
        assert torch.equal(last_tokens, before) or num_stages >= 0
        return logits

    def by_single_ops(self) -> tuple[Tensor, Tensor, dict[tuple[str, int], Tensor]]:
        """On the CPU: logits, the cache, and what each stage gives, by the names of the exchange."""
        config, w, i = self.config, self.weights, {name: t.cpu() for name, t in self.inputs.items()}
        weights = Weights(
            w.embed.cpu(),
            [type(x)(**{n: getattr(x, n).cpu() for n in x.__slots__}) for x in w.layers],
            w.final_norm.cpu(),
            w.lm_head.cpu(),
            w.arena,
        )
        count, dtype = len(i["rows"]), w.embed.dtype
        plan = plan_buffers(config, Limits(count, count, len(self.rope), self.block_size), str(dtype)[6:])
        buffers = {b.name: torch.zeros(b.shape, dtype=getattr(torch, b.dtype)) for b in plan.buffers}
        buffers["rope_table"].copy_(self.rope.cpu()[: len(buffers["rope_table"])])
        cache = self.kv_cache.cpu().clone()
        seen: dict[tuple[str, int], Tensor] = {}

        def note(stage: str, layer: int) -> None:
            if stage == "qkv":  # the fused step rotates queries and keys here
                qkv = buffers["qkv"].clone()
                ops.rope_store(qkv, cache[layer].clone(), buffers["rope_table"], i["positions"], i["slots"])
                seen["qkv", layer] = qkv[:, : config.num_heads * config.head_dim]
            elif stage == "attention":
                seen["attention", layer] = buffers["attention"].clone()
            elif stage == "mlp_norm":
                seen["middle", layer] = buffers["hidden"].clone()
            elif stage == "silu_mul":
                seen["activation", layer] = buffers["activation"].clone()
            elif (stage == "attn_norm" and layer > 0) or stage == "final_norm":
                seen["hidden", (layer if layer > 0 else config.num_layers) - 1] = buffers["hidden"].clone()

        model = Llama(config, weights, buffers, cache, i["block_table"])
        batch = Batch(i["token_ids"], i["rows"], i["context_lens"])
        return model.forward(batch, DecodeShare(1, 1), note), cache, seen


def error(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.cpu().double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-3))


def passed_on(step: Step, workspace: Tensor, name: str, layer: int, width: int) -> Tensor:
    """What a stage has written, [rows, width], from the set that the last step used."""
    count = len(step.inputs["rows"])
    offsets = decode_step.exchange_offsets(step.config, count)
    header = decode_step.HEADER_WORDS
    last_set = (int(workspace[0]) - 1) % 2
    start = header + last_set * ((len(workspace) - header) // 2 // 32 * 32) + layer * offsets["layer"] + offsets[name]
    return workspace[start : start + count * width // 2].view(step.weights.embed.dtype).view(count, width)


LENGTHS = [[1], [16], [129], [15, 16, 17], [7, 0, 64, 33], [1, 2, 31, 32, 33, 100, 200, 255]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_decode_step(device: str, size: str, lengths: list[int]) -> None:
    config = SIZES[size]
    for dtype in (torch.bfloat16, torch.float16) if device == "cuda" else (torch.float32, torch.bfloat16):
        step = Step.make(config, lengths, dtype, device, block_size=8 if size == "odd sizes" else 16)
        expected, cache, seen = step.by_single_ops()
        workspace = step.workspace()
        logits = step.run(workspace)
        widths = {"qkv": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim}
        if device == "cuda":
            assert workspace[decode_step.ERROR_WORDS].tolist() == [0] * 4
            for (name, layer), tensor in seen.items():
                actual = passed_on(step, workspace, name, layer, widths.get(name, tensor.size(1)))
                found = error(actual[:, : tensor.size(1)], tensor)
                assert found <= TOLERANCE[dtype], f"{name} of layer {layer}: error {found:.3g}"
        assert error(logits, expected) <= TOLERANCE[dtype]
        assert error(step.kv_cache, cache) <= TOLERANCE[dtype]
        for _ in range(3):  # both sets of the workspace, more than once
            assert torch.equal(step.run(workspace, samples=False), logits)


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("size", ["even", "odd sizes", "long rows"])
def test_decode_step_draws_as_sample_does(device: str, size: str, count: int) -> None:
    step = Step.make(SIZES[size], [5, 0, 40, 7, 300, 1, 16, 33][:count], torch.bfloat16, device)
    workspace = step.workspace()
    for temperature in (0.01, 0.7, 1.0, 3.0, 1e-38):
        temperatures = torch.full((len(step.inputs["block_table"]),), temperature, device=device)
        temperatures[count // 2] *= count % 2  # one row of some batches is greedy
        for _ in range(2):
            step.run(workspace, temperatures=temperatures)


@pytest.mark.parametrize("feature", [0, 131, 299])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_decode_step_finds_no_token_where_logits_are_no_numbers(device: str, temperature: float, feature: int) -> None:
    """As `sample`, with which `run` compares; of a row without numbers, and of a single logit in all rows."""
    step = Step.make(SIZES["even"], [5, 0, 40, 7, 300], torch.bfloat16, device)
    token_ids, workspace, embed = step.inputs["token_ids"], step.workspace(), step.weights.embed.clone()
    temperatures = torch.full((len(step.inputs["block_table"]),), temperature, device=device)
    for value in (torch.nan, torch.inf):
        step.weights.embed[token_ids[2]] = value
        spoiled = step.run(workspace, temperatures=temperatures).isnan().all(dim=1)
        assert torch.equal(spoiled[[0, 2, 3, 4]], (token_ids == token_ids[2])[[0, 2, 3, 4]])
    step.weights.embed.view(torch.int16)[token_ids[2]] = -1  # NaN as well, and what the kernel waits for elsewhere
    step.run(workspace, temperatures=temperatures)
    assert workspace[decode_step.ERROR_WORDS].tolist() == [0] * 4
    step.weights.embed.copy_(embed)
    for value in (torch.nan, torch.inf, -torch.inf):
        step.weights.lm_head[feature, :2] = torch.tensor([value, 0])
        logits = step.run(workspace, temperatures=temperatures)[[0, 2, 3, 4]]
        assert logits.isfinite().sum(dim=1).tolist() == [299] * 4


@pytest.mark.parametrize("length", [257, 512, 1025, 2049, 4097, 8000])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_decode_step_splits_long_contexts(device: str, count: int, length: int) -> None:
    step = Step.make(SIZES["even"], [max(length - 100 * i, 1) for i in range(count)], torch.bfloat16, device)
    expected, cache, _ = step.by_single_ops()
    assert error(step.run(step.workspace()), expected) <= TOLERANCE[torch.bfloat16]
    assert error(step.kv_cache, cache) <= TOLERANCE[torch.bfloat16]


def test_batches_of_any_size_share_a_workspace(device: str) -> None:
    workspace = Step.make(SIZES["even"], [1], torch.bfloat16, device).workspace()
    for count in (1, 8, 8, 1, 1, 5, 1, 8, 2, 7):
        step = Step.make(SIZES["even"], [30 + i for i in range(count)], torch.bfloat16, device)
        expected, _, _ = step.by_single_ops()
        assert error(step.run(workspace), expected) <= TOLERANCE[torch.bfloat16]


def test_decode_step_stops_after_a_stage(device: str) -> None:
    if device == "cpu":
        pytest.skip("stages are the kernel's")
    step = Step.make(SIZES["even"], [20, 40], torch.bfloat16, device)
    for num_stages in range(5 * step.config.num_layers + 1):
        workspace = step.workspace()
        times = torch.zeros(
            torch.cuda.get_device_properties(0).multi_processor_count, num_stages, 2, dtype=torch.int64, device=device
        )
        assert step.run(workspace, False, num_stages, times).isnan().all()
        assert workspace[decode_step.ERROR_WORDS].tolist() == [0] * 4
        for number in range(5 * step.config.num_layers):
            name = ("qkv", "attention", "middle", "activation", "hidden")[number % 5]
            width = 64 if name == "attention" else 256
            written = passed_on(step, workspace, name, number // 5, width).view(torch.int32) != -1
            assert bool(written.all()) == (number < num_stages), f"stage {number} of {num_stages}"
        assert (times.amax(dim=(0, 2)) > 0).all()


def test_stages_are_timed(device: str) -> None:
    step = Step.make(SIZES["even"], [40, 40], torch.bfloat16, device)
    table = step.inputs["block_table"]
    stages = measure_stages(step.config, step.weights, step.kv_cache, table, step.rope, 40, 2)
    names = [*decode_step.STAGES, "logits", ""] if device == "cuda" else []
    assert [stage.name for stage in stages] == names
    assert all(len(stage.samples) == 2 and min(stage.samples) > 0 and stage.bytes > 0 for stage in stages)


def test_unsupported_shapes_are_refused(device: str) -> None:
    assert decode_step.is_supported(SIZES["even"], "bfloat16")
    assert not decode_step.is_supported(SIZES["even"], "float32")
    assert not decode_step.is_supported(ModelConfig(8192, 2, 64, 8, 128, 28672, 300), "bfloat16")
    if device == "cuda":
        step = Step.make(SIZES["even"], [5] * 9, torch.bfloat16, device)
        with pytest.raises(RuntimeError, match="decode_step"):
            step.run(step.workspace())


def test_errors_are_described() -> None:
    assert decode_step.describe_error([0, 0, 0, 0]) is None
    assert decode_step.describe_error([1 + 5 * 3 + 4, 131, 8, 0]) == "down of layer 3, CTA 131, warp 8"


def test_bench_says_where_no_stages_are() -> None:
    outcome = tinyvllm("bench", "--device", "cpu", "--model", "demo", "--stages", "-p", 16, "-n", 2, "-r", 1)
    assert (outcome.code, outcome.out) == (1, "")
    assert "--stages: no decode test runs as the fused step here" in outcome.err
