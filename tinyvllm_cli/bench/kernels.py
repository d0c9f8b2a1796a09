"""Every op alone, at a model's shapes.

On CUDA one graph holds the op once for each layer, with that layer's weights and cache, so that the large ones are read
from memory and not from the L2 cache; its replays are timed by events.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tinyvllm_cli.bench.stages import measure_stages
from tinyvllm_cli.bench.traffic import Ceiling, Part, Work

if TYPE_CHECKING:
    import torch

    from tinyvllm_cli.checkpoint.config import ModelConfig
    from tinyvllm_cli.checkpoint.weights import Weights

BLOCK_SIZE = 16
SAMPLES = 5
SAMPLE_SECONDS = 0.02
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KernelResult:
    """One op at one shape.

    Attributes:
        op: name in `ops.py`; what: the weight it works on, or "".
        phase: "decode" or "prefill"; tokens: rows it works on; context: tokens attended to by each sequence.
        samples: seconds of one call, each over many calls. us: their median in microseconds.
        bytes, flops: what it must move and do at least.
        gb_per_second, tflop_per_second, share_of_ceiling, bound: as in `Result`.
    """

    op: str
    what: str
    phase: str
    tokens: int
    context: int
    samples: list[float]
    us: float
    bytes: float
    flops: float
    gb_per_second: float
    tflop_per_second: float
    share_of_ceiling: float | None
    bound: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Op(NamedTuple):
    """`call(i)` runs the op with what belongs to layer i; nbytes, flops: of one call."""

    op: str
    what: str
    nbytes: float
    flops: float
    call: Callable[[int], object]


def measure_kernels(
    config: ModelConfig,
    device: str,
    dtype: str,
    ceiling: Ceiling | None,
    *,
    batches: Sequence[int],
    context: int,
    prompts: Sequence[int],
    seed: int = 0,
    only_stages: bool = False,
) -> Iterator[KernelResult]:
    """Times the ops of a decode step (each batch size, at `context`) and of a prefill (one prompt of each length).

    only_stages: of all these only the stages of `decode_step`, where it runs. Weights are random. On CUDA the extension
    must be loaded.
    """
    import torch

    import tinyvllm_cli.reference  # noqa: F401  (registers the CPU implementations)
    from tinyvllm_cli.model.dummy import random_weights

    place = torch.device(device)
    weights = random_weights(config, dtype=getattr(torch, dtype), device=place, seed=seed)
    with torch.inference_mode():
        for batch in batches:
            bench = _Shapes(config, weights, tokens=batch, num_seqs=batch, context=context)
            ops = () if only_stages else (*bench.common(), *bench.decode(), *bench.last())
            for op in ops:
                yield _result(op, "decode", batch, context, config.num_layers, place, ceiling)
            for stage in measure_stages(config, weights, bench.cache, bench.table, bench.rope, context, SAMPLES):
                op = _Op("decode_step", stage.name, stage.bytes, stage.flops, lambda i: None)
                yield _row(op, stage.samples, "decode", batch, context, ceiling)
        for length in prompts:
            bench = _Shapes(config, weights, tokens=length, num_seqs=1, context=length)
            for op in (*bench.common(), *bench.prefill()):
                yield _result(op, "prefill", length, length, config.num_layers, place, ceiling)


class _Shapes:
    """The tensors of one step: `tokens` tokens of `num_seqs` sequences, which have `context` tokens in the cache."""

    def __init__(self, config: ModelConfig, weights: Weights, *, tokens: int, num_seqs: int, context: int) -> None:
        import torch

        from tinyvllm_cli.memory.plan import SAMPLE_WORKSPACE_FLOATS, decode_splits
        from tinyvllm_cli.model.rope import rope_table

        self.config, self.weights, self.tokens, self.num_seqs, self.context = config, weights, tokens, num_seqs, context
        c, device, dtype = config, weights.embed.device, weights.embed.dtype
        q, k, d = c.num_heads, c.num_kv_heads, c.head_dim
        self.itemsize = dtype.itemsize

        def random(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=dtype).normal_()

        def index(*values: int) -> torch.Tensor:
            return torch.tensor(values, device=device, dtype=torch.int32)

        self.hidden, self.normed, self.projection = (random(tokens, c.hidden_size) for _ in range(3))
        self.qkv, self.attention = random(tokens, (q + 2 * k) * d), random(tokens, q * d)
        self.gate_up, self.activation = random(tokens, 2 * c.intermediate_size), random(tokens, c.intermediate_size)
        blocks = -(-context // BLOCK_SIZE)
        self.cache = random(c.num_layers, num_seqs * blocks, k, 2, BLOCK_SIZE, d)
        order = torch.randperm(num_seqs * blocks, device=device)
        self.table = order.to(torch.int32).view(num_seqs, blocks)
        self.rows, self.lens = index(*range(num_seqs)), index(*[context] * num_seqs)
        self.starts = index(*[i * (tokens // num_seqs) for i in range(num_seqs + 1)])
        last = torch.arange(context - tokens // num_seqs, context, device=device).repeat(num_seqs)
        blocks_of_last = self.table.repeat_interleave(tokens // num_seqs, 0).gather(1, (last // BLOCK_SIZE)[:, None])
        self.positions = last.to(torch.int32)
        self.slots = (blocks_of_last[:, 0] * BLOCK_SIZE + last % BLOCK_SIZE).to(torch.int32)
        self.rope = torch.empty(context, d, device=device)
        rope_table(self.rope, c.rope, d)
        self.splits = decode_splits(num_seqs, k)
        self.parts = torch.empty(num_seqs * self.splits, 8, device=device, dtype=torch.int32)
        self.partials = torch.zeros(4 + num_seqs * q * self.splits * (d + 4), device=device)
        self.ids = torch.randint(c.vocab_size, (tokens,), device=device, dtype=torch.int32)
        self.logits = torch.empty(num_seqs, c.vocab_size, device=device).normal_()
        self.sampled, self.last_tokens = torch.zeros_like(self.rows), torch.zeros_like(self.rows)
        self.seeds, self.ranks = (torch.zeros(num_seqs, device=device, dtype=torch.int64) for _ in range(2))
        self.top_k = torch.zeros_like(self.rows)
        self.zeros, self.ones = torch.zeros(num_seqs, device=device), torch.ones(num_seqs, device=device)
        self.workspace = torch.empty(num_seqs, SAMPLE_WORKSPACE_FLOATS, device=device)
        self.sample_counters = torch.zeros_like(self.rows)

    def _linear(self, what: str, out: torch.Tensor, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> _Op:
        from tinyvllm_cli import gemm, ops

        rows, size = x.size(0), weights[0].numel()
        name = "matvec" if x.is_cuda and rows <= gemm.MATVEC_MAX_ROWS else "linear"
        name = "linear_hopper" if gemm.suits_hopper(x) else name
        name = "linear_wide" if gemm.suits_linear_wide(x, weights[0]) and out.dtype == x.dtype else name
        nbytes = weights[0].nbytes + x.nbytes + out.nbytes
        return _Op(name, what, nbytes, 2 * rows * size, lambda i: ops.linear(out, x, weights[i % len(weights)]))

    def _add_linear(self, what: str, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Iterator[_Op]:
        from tinyvllm_cli import gemm, ops

        narrow = gemm.suits_hopper(x)
        if narrow or gemm.suits_add_wide(x, weights[0]):
            nbytes = weights[0].nbytes + x.nbytes + 2 * self.hidden.nbytes
            flops = 2 * x.size(0) * weights[0].numel()
            name, add = "add_linear_wide", ops.add_linear_wide
            if narrow:
                name, add = "add_linear_hopper", ops.add_linear_hopper
            nothing = (None, None, None)
            yield _Op(name, what, nbytes, flops, lambda i: add(self.hidden, *nothing, x, weights[i], None))

    def common(self) -> Iterator[_Op]:
        """The ops of every layer but attention, and the embedding."""
        from tinyvllm_cli import gemm, ops

        c, w = self.config, self.weights
        row = self.hidden.nbytes
        yield _Op("embedding", "", 2 * row, 0, lambda i: ops.embedding(self.hidden, w.embed, self.ids))
        yield _Op(
            "rms_norm", "", 2 * row, 0,
            lambda i: ops.rms_norm(self.normed, self.hidden, w.layers[i].attn_norm, c.rms_norm_eps),
        )  # fmt: skip
        yield _Op(
            "add_rms_norm", "", 4 * row, 0,
            lambda i: ops.add_rms_norm(self.normed, self.hidden, self.projection, w.layers[i].mlp_norm, c.rms_norm_eps),
        )  # fmt: skip
        yield self._linear("qkv", self.qkv, self.normed, [layer.qkv for layer in w.layers])
        yield self._linear("o", self.projection, self.attention, [layer.o for layer in w.layers])
        narrow, wide = gemm.suits_hopper(self.normed), gemm.suits_wide(self.normed, w.layers[0].gate_up)
        if narrow or wide:
            size, nbytes = w.layers[0].gate_up.numel(), w.layers[0].gate_up.nbytes
            yield _Op(
                "gated_linear_hopper" if narrow else "gated_linear_wide",
                "gate_up", nbytes + row + self.activation.nbytes, 2 * self.tokens * size,
                lambda i: ops.gated_linear(self.activation, self.gate_up, self.normed, w.layers[i].gate_up),
            )  # fmt: skip
        yield self._linear("gate_up", self.gate_up, self.normed, [layer.gate_up for layer in w.layers])
        nbytes = self.gate_up.nbytes + self.activation.nbytes
        yield _Op("silu_mul", "", nbytes, 0, lambda i: ops.silu_mul(self.activation, self.gate_up))
        yield from self._add_linear("o", self.attention, [layer.o for layer in w.layers])
        yield from self._add_linear("down", self.activation, [layer.down for layer in w.layers])
        yield self._linear("down", self.projection, self.activation, [layer.down for layer in w.layers])

    def decode(self) -> Iterator[_Op]:
        from tinyvllm_cli import ops

        c, pairs = self.config, self.num_seqs * self.context
        ops.decode_parts(self.parts, self.rows, self.lens, c.num_heads, c.num_kv_heads, c.head_dim, self.splits, 1)
        yield _Op(
            "attention_decode", "",
            pairs * c.num_kv_heads * 2 * c.head_dim * self.itemsize + self.qkv.nbytes + self.attention.nbytes,
            4 * pairs * c.num_heads * c.head_dim,
            lambda i: ops.attention_decode(
                self.attention, self.qkv, self.cache[i], self.rope, self.table, self.parts, self.partials,
                self.splits, 1, c.head_dim**-0.5,
            ),
        )  # fmt: skip

    def prefill(self) -> Iterator[_Op]:
        from tinyvllm_cli import ops

        c, length = self.config, self.tokens // self.num_seqs
        q = self.qkv[:, : c.num_heads * c.head_dim]
        pairs = self.num_seqs * length * (self.context - length + (length + 1) / 2)
        cached = self.num_seqs * self.context * c.num_kv_heads * 2 * c.head_dim * self.itemsize
        yield _Op(
            "rope_store", "", 2 * self.qkv.nbytes, 0,
            lambda i: ops.rope_store(self.qkv, self.cache[i], self.rope, self.positions, self.slots),
        )  # fmt: skip
        yield _Op(
            "attention_prefill", "", cached + 2 * self.attention.nbytes, 4 * pairs * c.num_heads * c.head_dim,
            lambda i: ops.attention_prefill(
                self.attention, q, self.cache[i], self.table, self.rows, self.starts, self.lens, length,
                c.head_dim**-0.5,
            ),
        )  # fmt: skip

    def last(self) -> Iterator[_Op]:
        """Behind the layers: logits, and the choice of a token, greedy and drawn from all."""
        from tinyvllm_cli import gemm, ops

        x, head = self.normed[: self.num_seqs], self.weights.lm_head
        if gemm.suits_argmax(x):
            yield _Op(
                "argmax_linear_hopper", "logits", head.nbytes + x.nbytes, 2 * self.num_seqs * head.numel(),
                lambda i: ops.argmax_linear_hopper(self.sampled, self.last_tokens, self.ranks, x, head, self.rows),
            )  # fmt: skip
        yield self._linear("logits", self.logits, x, [head])
        self.logits.normal_()
        yield self._sample("greedy", self.zeros, self.ones)
        yield self._sample("top-p", self.ones, self.ones * 0.9)

    def _sample(self, what: str, temperature: torch.Tensor, top_p: torch.Tensor) -> _Op:
        from tinyvllm_cli import ops

        return _Op(
            "sample", what, self.logits.nbytes, 0,
            lambda i: ops.sample(
                self.sampled, self.last_tokens, self.logits, self.rows, self.positions, temperature, self.top_k, top_p,
                self.zeros, self.seeds, self.workspace, self.sample_counters,
            ),
        )  # fmt: skip


def _result(
    op: _Op, phase: str, tokens: int, context: int, layers: int, device: torch.device, ceiling: Ceiling | None
) -> KernelResult:
    attended = context if op.op.startswith("attention") else 0
    return _row(op, _time(op.call, layers, device), phase, tokens, attended, ceiling)


def _row(op: _Op, samples: list[float], phase: str, tokens: int, context: int, ceiling: Ceiling | None) -> KernelResult:
    median = statistics.median(samples)
    work = Work((Part(op.nbytes, op.flops),))
    share = work.floor(ceiling) / median if ceiling else None
    bound = "" if ceiling is None else "memory" if work.is_memory_bound(ceiling) else "compute"
    rates = op.nbytes / median / 1e9, op.flops / median / 1e12
    return KernelResult(
        op.op, op.what, phase, tokens, context, samples, 1e6 * median, op.nbytes, op.flops, *rates, share, bound
    )


def _time(call: Callable[[int], object], layers: int, device: torch.device) -> list[float]:
    """Seconds of one call, SAMPLES times, each over at least SAMPLE_SECONDS."""
    run = _captured(call, layers) if device.type == "cuda" else lambda: [call(i) for i in range(layers)]
    _seconds(run, 1, device)  # warm-up
    rounds = max(1, round(SAMPLE_SECONDS / max(_seconds(run, 1, device), 1e-6)))
    return [_seconds(run, rounds, device) / rounds / layers for _ in range(SAMPLES)]


def _captured(call: Callable[[int], object], layers: int) -> Callable[[], object]:
    """Replays a CUDA graph of one call for each layer."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(layers):
            call(i)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(layers):
            call(i)
    return graph.replay


def _seconds(run: Callable[[], object], rounds: int, device: torch.device) -> float:
    if device.type == "cuda":
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(rounds):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    began = time.perf_counter()
    for _ in range(rounds):
        run()
    return time.perf_counter() - began
