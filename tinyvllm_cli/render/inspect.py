"""How `inspect` looks: tables or one JSON object on stdout, faults and warnings on stderr."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tinyvllm_cli.render.console import Console, one_line

if TYPE_CHECKING:
    from rich.table import Table

    from tinyvllm_cli.checkpoint.config import ModelConfig
    from tinyvllm_cli.checkpoint.header import TensorInfo
    from tinyvllm_cli.commands.inspect import InspectResult, MemoryPlan


LISTED_TENSORS = 40
"""More tensors than these are shown folded."""


def show(result: InspectResult, console: Console) -> None:
    """Shows everything that was found. A file whose header is broken leaves stdout empty, but for JSON."""
    if console.mode == "json":
        console.json(result.to_json())
    elif result.checkpoint.tensors and not (result.faults and result.config is None):
        _show_tables(result, console)
    for warning in result.warnings:
        console.warn(warning)
    for fault in result.unsupported:
        console.warn(f"tinyvllm cannot run this model: {fault}")
    if result.error:
        console.error(result.error)


def _show_tables(result: InspectResult, console: Console) -> None:
    rich = console.rich()
    console.heading(str(result.path))
    if result.config:
        rich.print(_pairs(_config_words(result.config, result)))
    tensors = list(result.checkpoint.tensors.values())
    if len(tensors) <= LISTED_TENSORS:
        console.heading("Tensors")
        rich.print(_tensors(tensors))
    else:
        console.heading("Tensors (repeated layers folded; --json lists every tensor)")
        rich.print(_folded_tensors(tensors))
    if len(result.checkpoint.files) > 1:
        console.heading("Files")
        rich.print(_files(result))
    console.heading("Totals")
    rich.print(_totals(result))
    if result.plan:
        num_tokens, num_seqs = result.plan.limits.max_batched_tokens, result.plan.limits.max_num_seqs
        console.heading(f"Buffers (T: {num_tokens:,} tokens a step, S: {num_seqs:,} sequences)")
        rich.print(_buffers(result.plan))
        console.heading("Memory")
        rich.print(_pairs(_memory_words(result.plan)))


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _pairs(rows: list[tuple[str, str]]) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for key, value in rows:
        table.add_row(one_line(key), one_line(value))
    return table


def _config_words(config: ModelConfig, result: InspectResult) -> list[tuple[str, str]]:
    ratio = config.num_heads // config.num_kv_heads
    heads = f"{config.num_heads} query heads of {config.head_dim}, {config.num_kv_heads} KV heads"
    rope = config.rope
    scaling = {
        "default": "",
        "linear": f", positions divided by {rope.factor:g}",
        "llama3": f", Llama 3 scaling: factor {rope.factor:g}, low {rope.low_freq_factor:g}, "
        f"high {rope.high_freq_factor:g}, made for {rope.original_max_position_embeddings:,}",
    }[rope.kind]
    eos = ", ".join(map(str, config.eos_token_ids)) or "none"
    bos = "none" if config.bos_token_id is None else config.bos_token_id
    return [
        ("Architecture", f"{config.architecture}, {config.num_layers} layers, hidden size {config.hidden_size:,}"),
        ("Attention", heads + (f" ({ratio} query heads share one)" if ratio > 1 else "")),
        ("MLP", f"{config.intermediate_size:,} wide"),
        ("Vocabulary", f"{config.vocab_size:,} tokens, embeddings {'tied' if result.tied else 'not tied'}"),
        ("RoPE", f"theta {rope.theta:,g}{scaling}"),
        ("Context", f"{config.max_position_embeddings:,} tokens"),
        ("Special tokens", f"BOS {bos}, EOS {eos}"),
        ("Chat template", "yes" if result.has_chat_template else "no"),
    ]


def _tensors(tensors: list[TensorInfo]) -> Table:
    table = _table("Name", "Dtype", "Shape", "Bytes", right=("Bytes",))
    for tensor in tensors:
        table.add_row(one_line(tensor.name), tensor.dtype, _shape(tensor.shape), f"{tensor.nbytes:,}")
    return table


def _folded_tensors(tensors: list[TensorInfo]) -> Table:
    """One row for tensors whose names differ in a number only, with the sum of their bytes."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[TensorInfo]] = {}
    for tensor in tensors:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor.name)
        groups.setdefault((pattern, tensor.dtype, tensor.shape), []).append(tensor)
    table = _table("Name", "Dtype", "Shape", "Count", "Bytes", right=("Count", "Bytes"))
    for (pattern, dtype, shape), group in groups.items():
        name = one_line(pattern if len(group) > 1 else group[0].name)
        table.add_row(name, dtype, _shape(shape), f"{len(group):,}", f"{sum(t.nbytes for t in group):,}")
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _files(result: InspectResult) -> Table:
    table = _table("File", "Name", "Tensors", "Bytes", right=("File", "Tensors", "Bytes"))
    for number, header in enumerate(result.checkpoint.files, 1):
        table.add_row(str(number), one_line(header.path.name), f"{len(header.tensors):,}", f"{header.data_bytes:,}")
    return table


def _totals(result: InspectResult) -> Table:
    totals = result.totals
    table = _table("Dtype", "Tensors", "Parameters", "Bytes", right=("Tensors", "Parameters", "Bytes"))
    for dtype, (count, elements, nbytes) in totals.by_dtype.items():
        table.add_row(dtype, f"{count:,}", f"{elements:,}", f"{nbytes:,}")
    if len(totals.by_dtype) > 1:
        table.add_row("all", f"{totals.num_tensors:,}", f"{totals.num_parameters:,}", f"{totals.num_bytes:,}")
    return table


def _buffers(plan: MemoryPlan) -> Table:
    table = _table("Buffer", "Bytes", "Formula", "Role", right=("Bytes",))
    for buffer in plan.buffers.buffers:
        table.add_row(buffer.name, f"{buffer.nbytes:,}", f"{buffer.formula} {buffer.dtype}", buffer.role)
    return table


def _memory_words(plan: MemoryPlan) -> list[tuple[str, str]]:
    limits, kv = plan.limits, plan.kv
    rows = [
        (
            "Sized for",
            f"{limits.max_num_seqs:,} sequences of at most {limits.max_model_len:,} tokens, "
            f"{limits.max_batched_tokens:,} tokens a step",
        ),
        ("Weights", f"{size(plan.weights_bytes)} as {plan.dtype}"),
        ("Buffers", f"{size(plan.buffers.total_bytes)}, those that are never needed together share memory"),
    ]
    if kv is None:
        return [*rows, ("KV cache", "no room")]
    seqs = kv.num_blocks // limits.blocks_per_seq
    of = "all sequences at full length" if plan.memory is None else f"of {size(plan.memory)} in all"
    rows += [
        ("KV a token", f"{size(plan.kv_bytes_per_token)}, a block of {kv.block_size} tokens {size(kv.block_bytes)}"),
        ("KV cache", f"{size(kv.total_bytes)} for {of}: {kv.num_blocks:,} blocks, {kv.num_tokens:,} tokens"),
    ]
    if plan.memory is not None:
        rows.append(("Room for", f"{seqs:,} sequences of {limits.max_model_len:,} tokens"))
    return rows


def size(nbytes: int) -> str:
    """Bytes in the unit that people read easily: "512 B", "1.50 MiB"."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes:,} B" if unit == "B" else f"{value:,.2f} {unit}"
