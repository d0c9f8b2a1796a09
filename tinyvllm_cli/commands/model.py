"""Which model a command works on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from tinyvllm_cli.errors import UserError

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


class ResolvedModel(NamedTuple):
    """path: folder or file; note: one line for people that says which model it is and why this one."""

    path: Path
    note: str


def resolve_model(option: str | None) -> ResolvedModel:
    """Finds the model: `option`, else TINYVLLM_MODEL, else the current folder if it is one, else the bundled demo.

    "demo" names the bundled model, "./demo" a folder. UserError when there is nothing at the path.
    """
    if option is not None:
        return _named(option, "--model")
    variable = os.environ.get("TINYVLLM_MODEL")
    if variable:
        return _named(variable, "TINYVLLM_MODEL")
    here = Path()
    if (here / "config.json").is_file() and any(here.glob("*.safetensors")):
        here = Path.cwd()
        return ResolvedModel(here, f"model: {here} (the current folder)")
    return _demo("no --model given: ")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a model on the Hugging Face Hub: owner/model."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name and not name.endswith((".safetensors", ".json"))


def _named(name: str, origin: str) -> ResolvedModel:
    if name == DEMO:
        return _demo("")
    path = Path(os.path.expanduser(name))
    if not name or not path.exists():
        if is_hub_id(name):
            folder = name.partition("/")[2]
            raise UserError(
                f"there is no folder {name}, and models of the Hugging Face Hub are not downloaded",
                where=origin,
                fix=f"Fetch it: hf download {name} --local-dir {folder}\nThen give --model {folder}",
            )
        fix = "Give a model folder (config.json, *.safetensors, tokenizer.json), or demo for the bundled one."
        raise UserError(f"there is no {name or 'model with an empty name'}", where=origin, fix=fix)
    if path.is_file():
        if path.suffix != ".json":
            from tinyvllm_cli.checkpoint.header import read_header

            read_header(path)  # says what is wrong with a broken file
        fix = f"Give the folder: {path.absolute().parent}"  # of a link in the Hub's cache, not of what it leads to
        raise UserError(f"{path} is a file; a model is a folder", where=origin, fix=fix)
    return ResolvedModel(path, f"model: {path}" + (f" (from {origin})" if origin != "--model" else ""))


def _demo(reason: str) -> ResolvedModel:
    folder = Path(__file__).parent.parent / "demo"
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{reason}the bundled demo model is not in this installation",
            where=str(folder),
            fix="Give a model folder with --model DIR.",
        )
    return ResolvedModel(
        folder, f"model: the bundled demo, a toy for simple questions ({reason}--model DIR takes another)"
    )
