"""What has changed from one checkpoint to another, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tinyvllm_cli.checkpoint.header import TensorInfo
from tinyvllm_cli.checkpoint.index import Checkpoint


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that both have; num_differing: elements of other content, None when dtype or shape differ already."""

    old: TensorInfo
    new: TensorInfo
    num_differing: int | None = None


@dataclass(slots=True)
class Diff:
    """From a checkpoint to `other`; content was compared only if `content_checked`.

    Attributes:
        added, removed: tensors that only the other one, or only this one has.
        changed: in shape, dtype or content.
        num_same: tensors in which no difference was found.
    """

    other: str
    content_checked: bool
    added: list[TensorInfo] = field(default_factory=list)
    removed: list[TensorInfo] = field(default_factory=list)
    changed: list[Change] = field(default_factory=list)
    num_same: int = 0


def compare(
    this: Checkpoint, other: Checkpoint, label: str, count_differences: Callable[[str], int] | None = None
) -> Diff:
    """Compares names, dtypes and shapes; and contents, with a function that counts the elements that differ."""
    diff = Diff(label, count_differences is not None)
    diff.added = [tensor for name, tensor in other.tensors.items() if name not in this.tensors]
    for name, old in this.tensors.items():
        new = other.tensors.get(name)
        if new is None:
            diff.removed.append(old)
        elif (old.dtype, old.shape) != (new.dtype, new.shape):
            diff.changed.append(Change(old, new))
        elif count_differences and (count := count_differences(name)):
            diff.changed.append(Change(old, new, count))
        else:
            diff.num_same += 1
    return diff
