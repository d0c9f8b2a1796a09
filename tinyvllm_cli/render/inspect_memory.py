"""How `inspect` shows what a model will need: a bar of the memory, its parts in numbers, and every buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinyvllm_cli.render.console import Console, one_line
from tinyvllm_cli.render.table import pairs, size, table

if TYPE_CHECKING:
    from rich.table import Table

    from tinyvllm_cli.commands.inspect_preset import PresetResult
    from tinyvllm_cli.memory.budget import MemoryPlan
    from tinyvllm_cli.memory.plan import Buffer

MAX_BAR = 100
WIDE = 120
"""Columns from which on a table of buffers has one for each property."""
Segment = tuple[str, int, str, str]
"""Name, bytes, words about it, and what fills its part of the bar."""


def show_memory(plan: MemoryPlan, console: Console) -> None:
    """The bar with its legend, what fits, and the table of buffers."""
    rich, limits, device = console.rich(), plan.limits, plan.device
    of = f", {size(device.total_bytes)}" if device.total_bytes is not None else ""
    if device.cuda and device.free_bytes != device.total_bytes:
        of += f", {size(device.free_bytes or 0)} of it free"
    console.heading(f"Memory of {device.name}{of}")
    segments = _segments(plan)
    console.write(bar(segments, min(rich.width, MAX_BAR)) + "\n")
    rich.print(_legend(segments))
    rich.print(pairs(_words(plan)))
    console.heading(f"Buffers (T {limits.max_batched_tokens:,} tokens a step, S {limits.max_num_seqs:,} sequences)")
    rich.print(_buffers(plan, rich.width))


def show_preset(result: PresetResult, console: Console) -> None:
    """tiny-vllm's buffers, then ours for the same model and limits; or both as JSON."""
    if console.mode == "json":
        console.json(result.to_json())
        return
    rich = console.rich()
    console.heading("tiny-vllm: Llama 3.2 1B, 512 prompt tokens, 2 sequences of 2,048")
    rows = table("Buffer", "Bytes", "", "Formula and role", right=("Bytes", ""), whole=("Buffer", "Bytes", ""))
    for buffer in result.buffers:
        roles = ", then ".join(buffer.roles) + (" (alias)" if len(buffer.roles) > 1 else "")
        place = " (on the host)" if buffer.on_host else ""
        rows.add_row(buffer.name, f"{buffer.nbytes:,}", size(buffer.nbytes), f"{buffer.formula}\n{roles}{place}")
    rich.print(rows)
    limits = result.ours.limits
    console.heading(
        f"tinyvllm: the same model and limits (T {limits.max_batched_tokens:,} tokens a step, "
        f"S {limits.max_num_seqs:,} sequences)"
    )
    rich.print(_buffers(result.ours, rich.width))
    console.heading("Side by side")
    rows = table("", "tiny-vllm", "tinyvllm", right=("tiny-vllm", "tinyvllm"))
    ours, blocks = result.ours, result.kv_cache_bytes // result.kv_block_bytes
    buffers_of = sum(buffer.nbytes for buffer in ours.buffers.buffers)
    rows.add_row("buffers on the device", f"{result.device_bytes:,}", f"{ours.buffers.total_bytes:,}")
    rows.add_row("before memory is shared", f"{result.device_bytes:,}", f"{buffers_of:,}")
    rows.add_row("buffers on the host", f"{result.host_bytes:,}", "0")
    if ours.kv:
        rows.add_row("KV cache", f"{result.kv_cache_bytes:,}", f"{ours.kv.total_bytes:,}")
        rows.add_row("KV blocks", f"{blocks:,} of a layer each", f"{ours.kv.num_blocks:,} of all layers")
        rows.add_row("bytes of a block", f"{result.kv_block_bytes:,}", f"{ours.kv.block_bytes:,}")
    rich.print(rows)


def _segments(plan: MemoryPlan) -> list[Segment]:
    device, kv, limits = plan.device, plan.kv, plan.limits
    count = len(plan.buffers.buffers)
    cache = f"{kv.num_blocks:,} blocks of {kv.block_size} tokens: {kv.num_tokens:,} tokens" if kv else "no room"
    segments = [
        ("weights", plan.weights_bytes, plan.dtype, "█"),
        ("buffers", plan.buffers.total_bytes, f"{count} buffers; those never needed together share memory", "▓"),
        ("KV cache", kv.total_bytes if kv else 0, cache, "▒"),
    ]
    if device.cuda:
        segments.append(("graph reserve", plan.reserve_bytes, "for CUDA graphs and libraries", "░"))
        segments.append(("CUDA itself", plan.context_bytes, "context and kernels, an estimate", "+"))
    if device.total_bytes is not None and device.free_bytes is not None and device.cuda:
        others = device.total_bytes - device.free_bytes
        if others:
            segments.append(("in use", others, "by others, now", "x"))
        rest = device.total_bytes - sum(segment[1] for segment in segments)
        full = kv is not None and kv.num_blocks == limits.max_num_seqs * limits.blocks_per_seq
        why = "all sequences fit" if full else f"left alone: --memory-fraction {plan.memory_fraction:g}"
        segments.append(("unused", max(rest, 0), why, "·"))
    return segments


def bar(segments: list[Segment], width: int) -> str:
    """The parts of the whole as so many characters each; what is not nothing has at least one, the largest gives it."""
    whole = max(sum(nbytes for _, nbytes, _, _ in segments), 1)
    cells = [max(round(width * nbytes / whole), nbytes > 0) for _, nbytes, _, _ in segments]
    cells[cells.index(max(cells))] += width - sum(cells)
    return "".join(fill * count for (_, _, _, fill), count in zip(segments, cells, strict=True))


def _legend(segments: list[Segment]) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column()
    for name, nbytes, words, fill in segments:
        grid.add_row(fill, name, size(nbytes), one_line(words))
    return grid


def _words(plan: MemoryPlan) -> list[tuple[str, str]]:
    limits = plan.limits
    rows = [("KV a token", size(plan.kv_bytes_per_token) + f", a block {size(plan.kv.block_bytes)}" if plan.kv else "")]
    seqs = plan.full_length_seqs
    rows.append(
        ("At once", f"{seqs:,} sequences of {limits.max_model_len:,} tokens, of {limits.max_num_seqs:,} asked for")
    )
    rows.append(("Largest context", f"{plan.largest_context:,} tokens, for one sequence alone"))
    return rows


def _buffers(plan: MemoryPlan, width: int) -> Table:
    """One row a buffer, on a line of its own where there is room for it."""
    wide = width >= WIDE
    more = ("Live", "Shares memory with") if wide else ()
    rows = table("Buffer", "Bytes", "Formula and role", *more, right=("Bytes",), whole=("Buffer", "Bytes"))
    for buffer in plan.buffers.buffers:
        words = [f"{buffer.formula}, {buffer.dtype}", buffer.role]
        live, shares = _live(buffer), ", ".join(buffer.alias_of)
        if not wide:
            words += [f"live {live}"] + ([f"shares memory with {shares}"] if shares else [])
        row = (buffer.name, f"{buffer.nbytes:,}", "\n".join(words))
        rows.add_row(*row, live, shares or "-") if wide else rows.add_row(*row)
    rows.add_section()
    rows.add_row("arena", f"{plan.buffers.total_bytes:,}", "all of them")
    return rows


def _live(buffer: Buffer) -> str:
    """During which stages of a step it is needed."""
    from tinyvllm_cli.memory.plan import ALWAYS

    if buffer.live == ALWAYS:
        return "always"
    return ", ".join(first if first == last else f"{first} to {last}" for first, last in buffer.live)
