"""Faults: what is wrong with a checkpoint, collected so that all of them are reported and not only the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from tinyvllm_cli.errors import UserError

SHOWN_FAULTS = 20
"""An error message lists no more faults than this; the JSON of `inspect` has all of them."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        where: file (and tensor or key) that it concerns.
        what: one sentence.
        fix: what the user can do about it; may be empty.
        unsupported: the checkpoint itself may be right, but tinyvllm cannot run it.
    """

    where: str
    what: str
    fix: str = ""
    unsupported: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


def as_error(faults: Sequence[Fault]) -> UserError:
    """One UserError that names every fault."""
    if len(faults) == 1:
        return UserError(faults[0].what, where=faults[0].where, fix=faults[0].fix)
    lines = [f"  {fault}" for fault in faults[:SHOWN_FAULTS]]
    if len(faults) > SHOWN_FAULTS:
        lines.append(f"  and {len(faults) - SHOWN_FAULTS} more; `tinyvllm inspect --json` lists all")
    fixes = dict.fromkeys(fault.fix for fault in faults if fault.fix)
    return UserError("\n".join([f"{len(faults)} faults in the checkpoint", *lines]), fix="\n".join([*fixes][:3]))


def raise_any(faults: Sequence[Fault]) -> None:
    """Raises `as_error(faults)` unless there are none."""
    if faults:
        raise as_error(faults)


def quote(name: object, limit: int = 120) -> str:
    """A name or value from a file for a message: as a literal that shows control characters, and not endless."""
    text = repr(name) if not isinstance(name, str) or not name.isprintable() or not name else name
    return text if len(text) <= limit else text[: limit - 1] + "…"


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a JSON value is an integer (a bool is not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_token_id(value: Any) -> TypeGuard[int]:
    """Whether a JSON value can be a token id, which is an int32 here."""
    return is_int(value) and 0 <= value < 2**31
