"""The identity of a model folder: equal for equal content, other for any change that matters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from models import edit_json, write_rand

from tinyvllm_cli.checkpoint import identity
from tinyvllm_cli.checkpoint.identity import model_identity


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "PIECE", 1024)  # the test's files are small, and shall be sampled
    first = write_rand(tmp_path / "a")
    known = model_identity(first)
    assert len(known) == 16
    moved = copy(first, tmp_path / "b")
    (moved / "README.md").write_text("not part of it")
    (moved / "answers.json").write_text("neither is what is written here")
    assert model_identity(moved) == known
    assert model_identity(write_rand(tmp_path / "c", seed=1)) != known
    assert model_identity(write_rand(tmp_path / "d", dtype="bfloat16")) != known
    edit_json(moved / "tokenizer_config.json", chat_template="x")
    assert model_identity(moved) != known


def test_what_is_no_file_is_no_part_of_it(tmp_path: Path) -> None:
    """A pipe would be waited for without end."""
    folder = write_rand(tmp_path / "a")
    known = model_identity(folder)
    (folder / "onnx.json").mkdir()
    (folder / "adapter.safetensors").mkdir()
    (folder / "old.safetensors").symlink_to("/nowhere")
    os.mkfifo(folder / "chat_template.jinja")
    assert model_identity(folder) == known


def test_the_end_of_a_file_of_weights_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "PIECE", 1024)
    folder = write_rand(tmp_path / "a")
    known, path = model_identity(folder), folder / "model.safetensors"
    data = path.read_bytes()
    assert len(data) > 16 * 1024
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert model_identity(folder) != known
    path.write_bytes(data + b"\0")
    assert model_identity(folder) != known
