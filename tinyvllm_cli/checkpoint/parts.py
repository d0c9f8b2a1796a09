"""Tensors sorted into parts of a model (embedding, attention, MLP, norms, ...) and repeated layers folded into one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from tinyvllm_cli.checkpoint.header import TensorInfo

PARTS = ("embedding", "attention", "MLP", "norms", "output", "other")
_PATTERNS = (  # the first that is found in a name decides
    ("other", re.compile(r"rotary_emb|inv_freq")),
    ("norms", re.compile(r"norm|(^|\.)ln_")),
    ("embedding", re.compile(r"embed|(^|\.)w[tp]e\.")),
    ("output", re.compile(r"lm_head|(^|\.)output\.")),
    ("attention", re.compile(r"attn|attention")),
    ("MLP", re.compile(r"mlp|feed_forward|ffn|experts")),
)
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,8})(?=\.)")


@dataclass(frozen=True, slots=True)
class Fold:
    """Tensors alike in dtype and shape whose names differ in numbers only; `name` has * or a range in their place."""

    name: str
    tensors: tuple[TensorInfo, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@cache
def part_of(name: str) -> str:
    """One of PARTS, by the words that Hugging Face checkpoints use."""
    return next((part for part, pattern in _PATTERNS if pattern.search(name)), "other")


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to: the first number between dots."""
    match = _NUMBER.search(name)
    return int(match[0]) if match else None


def fold_layers(tensors: Iterable[TensorInfo]) -> list[Fold]:
    """Folds repeated layers, in the order of first appearance; `model.layers.{0-15}.mlp.up_proj.weight`."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[TensorInfo]] = {}
    for tensor in tensors:
        groups.setdefault((_NUMBER.sub("*", tensor.name), tensor.dtype, tensor.shape), []).append(tensor)
    return [Fold(_folded_name(pattern, group), tuple(group)) for (pattern, _, _), group in groups.items()]


def _folded_name(pattern: str, group: list[TensorInfo]) -> str:
    if len(group) == 1:
        return group[0].name
    if pattern.count("*") != 1:
        return pattern
    numbers = {layer for tensor in group if (layer := layer_of(tensor.name)) is not None}
    return pattern.replace("*", f"{{{ranges(numbers)}}}") if len(numbers) == len(group) else pattern


def ranges(numbers: Iterable[int]) -> str:
    """ "0-3,5,7-8" """
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
