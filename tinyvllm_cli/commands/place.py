"""Where `inspect` finds a checkpoint: a path, or a model on the Hub, of which it makes a shadow without the weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tinyvllm_cli.checkpoint.faults import Fault, quote
from tinyvllm_cli.commands.interrupt import unwinding
from tinyvllm_cli.commands.model import is_hub_id
from tinyvllm_cli.commands.settings import hub_access
from tinyvllm_cli.errors import ExitCode, UserError

Say = Callable[[str], None]


class Place(NamedTuple):
    """Where a checkpoint can be read, and what to call it; a shadow holds no data and is gone when all is done."""

    path: Path
    label: str
    is_shadow: bool = False
    warnings: tuple[str, ...] = ()

    def relabel(self, faults: list[Fault]) -> None:
        """Names the model on the Hub where faults name its shadow."""
        if self.is_shadow:
            shadow = str(self.path)
            faults[:] = [replace(fault, where=fault.where.replace(shadow, self.label)) for fault in faults]


def locate(path: Path, revision: str | None, data: bool, stack: ExitStack, say: Say) -> Place:
    """What is at a local path, else the model of that name on the Hub, for as long as `stack` is open.

    data: all the weights will be read, which is refused for the Hub. UserError when the Hub cannot help.
    """
    name = str(path)
    if os.path.lexists(path) or not is_hub_id(name):
        if revision is not None:
            what = f"{quote(name)} is no model on the Hub, so that it has no revisions"
            raise UserError(what, where="--revision", exit_code=ExitCode.USAGE)
        return Place(path, name)
    if data:
        raise UserError(
            f"{name} is not a folder here, and --check-data reads all of the weights",
            fix=f"Fetch them: hf download {name} --local-dir DIR",
            exit_code=ExitCode.USAGE,
        )
    from tempfile import TemporaryDirectory

    from tinyvllm_cli.checkpoint.hub import fetch_shadow

    stack.enter_context(unwinding())
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="tinyvllm-")))
    warnings = fetch_shadow(name, revision or "main", hub_access(), folder, say)
    say("")
    return Place(folder, name + (f"@{revision}" if revision else ""), True, tuple(warnings))
