"""What `inspect` does when it is told to read values, or to compare two checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tinyvllm_cli.checkpoint.faults import Fault, as_error, quote
from tinyvllm_cli.checkpoint.index import Checkpoint, scan_checkpoint
from tinyvllm_cli.commands.place import Place, Say

if TYPE_CHECKING:
    from tinyvllm_cli.checkpoint.data import TensorData
    from tinyvllm_cli.checkpoint.diff import Diff


def check_data(checkpoint: Checkpoint, say: Say) -> tuple[dict[str, TensorData], list[Fault]]:
    """Statistics of all values by tensor; values that are not finite are faults."""
    from tinyvllm_cli.checkpoint.data import scan_data

    found = scan_data(checkpoint, _reading("checking data", say))
    say("")
    faults = []
    for name, data in found.items():
        if data.first_bad is not None:
            tensor = checkpoint.tensors[name]
            first = list(_position(data.first_bad // (2 if tensor.dtype == "C64" else 1), tensor.shape))
            what = f"{data.num_nan:,} NaN and {data.num_inf:,} infinite values, the first at {first}"
            faults.append(Fault(quote(str(tensor.file), 4096), f"tensor {quote(name)}: {what}"))
    return found, faults


def compare_with(place: Place, checkpoint: Checkpoint, data: bool, say: Say) -> Diff:
    """What has changed from `checkpoint` to the one at `place`; data: in content, too. UserError if that has faults."""
    from tinyvllm_cli.checkpoint.diff import compare

    other, faults = scan_checkpoint(place.path)
    place.relabel(faults)
    if faults:
        raise as_error(faults)
    counter = None
    if data:
        from tinyvllm_cli.checkpoint.data import count_differences

        def counter(name: str) -> int:
            say(f"comparing {name}")
            return count_differences(checkpoint, other, name)

    diff = compare(checkpoint, other, place.label, counter)
    say("")
    return diff


def _position(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A flat index as one index for each dimension."""
    position = []
    for dim in reversed(shape):
        index, place = divmod(index, dim)
        position.append(place)
    return tuple(reversed(position))


def _reading(what: str, say: Say) -> Callable[[int, int], None]:
    """A progress function that says how far it is and how fast, not too often."""
    began = shown = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown > 0.1:
            shown = now
            bar = "█" * (20 * done // total) + "░" * (20 - 20 * done // total)
            say(f"{what} {bar} {done / 1e9:,.1f} of {total / 1e9:,.1f} GB, {done / 1e9 / (now - began):.1f} GB/s")

    return progress
