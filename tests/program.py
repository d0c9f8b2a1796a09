"""Runs the program within the test's process, as if from a shell with pipes."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tinyvllm_cli.cli import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def tinyvllm(*arguments: object, stdin: bytes = b"") -> Outcome:
    """Runs the program in this process; the streams are bytes and UTF-8, as in a pipe."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(stdin))))
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    assert "Traceback" not in texts[1]
    return Outcome(int(caught.value.code or 0), *texts)


DEVICE = "cpu"
"""Where `generate` computes; the fixture `on_each_device` changes it."""


def generate(*arguments: object, stdin: bytes = b"") -> Outcome:
    return tinyvllm("generate", "--device", DEVICE, *arguments, stdin=stdin)


def write_jsonl(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
