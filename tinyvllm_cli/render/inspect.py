"""How `inspect` looks: tables or one JSON object on stdout, faults and warnings on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinyvllm_cli.render.console import Console, one_line
from tinyvllm_cli.render.table import pairs, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from tinyvllm_cli.checkpoint.config import ModelConfig
    from tinyvllm_cli.checkpoint.diff import Diff
    from tinyvllm_cli.checkpoint.header import Header, TensorInfo
    from tinyvllm_cli.commands.inspect import InspectResult

SPARKS = "▁▂▃▄▅▆▇█"


def show(result: InspectResult, console: Console) -> None:
    """Shows everything that was found. A file whose header is broken leaves stdout empty, but for JSON."""
    if console.mode == "json":
        from tinyvllm_cli.commands.inspect_json import as_json

        console.json(as_json(result))
    elif result.checkpoint.tensors and not (result.faults and result.config is None and result.data is None):
        _show_tables(result, console)
    for warning in result.warnings:
        console.warn(warning)
    for fault in result.unsupported:
        console.warn(f"tinyvllm cannot run this model: {fault}")
    if result.error:
        console.error(result.error)


def _show_tables(result: InspectResult, console: Console) -> None:
    from tinyvllm_cli.render.inspect_memory import show_memory

    rich = console.rich()
    console.heading(result.label)
    if result.config:
        rich.print(pairs(_config_words(result.config, result)))
    if result.listed is not None:
        console.heading(f"Tensors ({len(result.listed):,} of {len(result.checkpoint.tensors):,})")
        rich.print(_tensors(result.listed, result))
    else:
        console.heading("Tensors (repeated layers folded; --tensors '*' lists each)")
        rich.print(_folded(result))
    if result.data is not None:
        console.heading("Values (histogram from the smallest to the largest)")
        wanted = result.checkpoint.tensors.values() if result.listed is None else result.listed
        rich.print(_values(wanted, result))
    if len(result.checkpoint.files) > 1:
        console.heading("Files")
        rich.print(_files(result.checkpoint.files))
    console.heading("Totals")
    rich.print(_totals(result))
    if result.diff:
        _show_diff(result.diff, console)
    if result.plan:
        show_memory(result.plan, console)


def _config_words(config: ModelConfig, result: InspectResult) -> list[tuple[str, str]]:
    ratio = config.num_heads // config.num_kv_heads
    heads = f"{config.num_heads} query heads of {config.head_dim}, {config.num_kv_heads} KV heads"
    rope = config.rope
    scaling = {
        "default": ", not scaled",
        "linear": f", positions divided by {rope.factor:g}",
        "llama3": f", Llama 3 scaling: factor {rope.factor:g}, low {rope.low_freq_factor:g}, "
        f"high {rope.high_freq_factor:g}, made for {rope.original_max_position_embeddings:,}",
    }[rope.kind]
    eos = ", ".join(map(str, config.eos_token_ids)) or "none"
    bos = "none" if config.bos_token_id is None else config.bos_token_id
    runs_on = result.runs_on or {}
    places = " and ".join(name for key, name in (("cpu", "the CPU"), ("cuda", "CUDA")) if runs_on.get(key))
    return [
        ("Architecture", f"{config.architecture}, {config.num_layers} layers, hidden size {config.hidden_size:,}"),
        ("Attention", heads + (f" ({ratio} query heads share one)" if ratio > 1 else "")),
        ("MLP", f"{config.intermediate_size:,} wide"),
        ("Vocabulary", f"{config.vocab_size:,} tokens, embeddings {'tied' if result.tied else 'not tied'}"),
        ("RoPE", f"theta {rope.theta:,g}{scaling}"),
        ("Context", f"{config.max_position_embeddings:,} tokens"),
        ("Special tokens", f"BOS {bos}, EOS {eos}"),
        ("Chat template", "yes" if result.has_chat_template else "no"),
        ("tinyvllm runs it", f"on {places}" if places else "no: see below"),
    ]


def _tensors(tensors: list[TensorInfo], result: InspectResult) -> Table:
    """One row a tensor, with the number of its file if there are several."""
    numbers = {header.path: number for number, header in enumerate(result.checkpoint.files, 1)}
    shards = ("File",) if len(numbers) > 1 else ()
    rows = table("Name", "Dtype", "Shape", "Bytes", *shards, right=("Bytes", "File"))
    for tensor in tensors:
        number = (str(numbers.get(tensor.file, "")),) if shards else ()
        rows.add_row(one_line(tensor.name), tensor.dtype, _shape(tensor.shape), f"{tensor.nbytes:,}", *number)
    return rows


def _folded(result: InspectResult) -> Table:
    """One row for tensors whose names differ in a number only, with the sum of their bytes."""
    from tinyvllm_cli.checkpoint.parts import fold_layers

    rows = table("Name", "Dtype", "Shape", "Count", "Bytes", right=("Count", "Bytes"))
    for fold in fold_layers(result.checkpoint.tensors.values()):
        first, number = fold.tensors[0], f"{len(fold.tensors):,}"
        rows.add_row(one_line(fold.name), first.dtype, _shape(first.shape), number, f"{fold.nbytes:,}")
    return rows


def _values(tensors: Iterable[TensorInfo], result: InspectResult) -> Table:
    rows = table("Name", "Min", "Max", "Histogram", "Not finite", right=("Min", "Max", "Not finite"))
    for tensor in tensors:
        data = (result.data or {}).get(tensor.name)
        if data is None:
            rows.add_row(one_line(tensor.name), "", "", "(packed: not read)", "")
            continue
        low, high = (("" if value is None else f"{value:.5g}") for value in (data.minimum, data.maximum))
        bad = data.num_nan + data.num_inf
        rows.add_row(one_line(tensor.name), low, high, sparkline(data.histogram), f"{bad:,}" if bad else "")
    return rows


def sparkline(counts: tuple[int, ...]) -> str:
    """One character a bin, as high as its count against the largest; a space for none."""
    top = max(counts, default=0)
    return "".join(SPARKS[(len(SPARKS) * count - 1) // top] if count else " " for count in counts)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _files(files: tuple[Header, ...]) -> Table:
    """The shard map: what each file holds."""
    from tinyvllm_cli.checkpoint.parts import layer_of, part_of, ranges

    rows = table("File", "Name", "Holds", "Tensors", "Data bytes", right=("File", "Tensors", "Data bytes"))
    for number, header in enumerate(files, 1):
        layers = {layer for tensor in header.tensors if (layer := layer_of(tensor.name)) is not None}
        others = dict.fromkeys(part_of(t.name) for t in header.tensors if layer_of(t.name) is None)
        holds = [*others, *([f"layers {ranges(layers)}"] if layers else [])]
        size = f"{max((tensor.end for tensor in header.tensors), default=0):,}"
        rows.add_row(str(number), one_line(header.path.name), ", ".join(holds), f"{len(header.tensors):,}", size)
    return rows


def _totals(result: InspectResult) -> Table:
    totals = result.totals
    rows = table("", "Tensors", "Parameters", "Bytes", "Share", right=("Tensors", "Parameters", "Bytes", "Share"))
    whole = max(totals.all.num_bytes, 1)
    groups = [totals.by_part, totals.by_dtype]
    for group in groups:
        for name, count in group.items():
            share = f"{100 * count.num_bytes / whole:.1f}%"
            rows.add_row(name, f"{count.num_tensors:,}", f"{count.num_parameters:,}", f"{count.num_bytes:,}", share)
        rows.add_section()
    count = totals.all
    rows.add_row("all", f"{count.num_tensors:,}", f"{count.num_parameters:,}", f"{count.num_bytes:,}", "")
    return rows


def _show_diff(diff: Diff, console: Console) -> None:
    checked = "names, dtypes, shapes and contents" if diff.content_checked else "names, dtypes and shapes"
    console.heading(f"Changes to {diff.other} ({checked}; {diff.num_same:,} tensors are the same)")
    if not (diff.added or diff.removed or diff.changed):
        console.write("none\n")
        return
    rows = table("", "Name", "From", "To")
    for tensor in diff.removed:
        rows.add_row("-", one_line(tensor.name), _kind(tensor), "")
    for tensor in diff.added:
        rows.add_row("+", one_line(tensor.name), "", _kind(tensor))
    for change in diff.changed:
        new = _kind(change.new) if change.num_differing is None else f"{change.num_differing:,} elements differ"
        rows.add_row("~", one_line(change.old.name), _kind(change.old), new)
    console.rich().print(rows)


def _kind(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {_shape(tensor.shape)}"
