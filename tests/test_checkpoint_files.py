"""Shards and index (C08), names and tied embeddings (C02), and the weights as they are loaded."""

from __future__ import annotations

import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files import edit_json, write_raw, write_tensors
from models import llama_config, rand_tensors, write_rand

from tinyvllm_cli.checkpoint import weights as weights_module
from tinyvllm_cli.checkpoint.config import read_config
from tinyvllm_cli.checkpoint.index import open_checkpoint
from tinyvllm_cli.checkpoint.names import map_weights, weights_layout
from tinyvllm_cli.checkpoint.weights import Weights, load_weights
from tinyvllm_cli.errors import UserError

SHARD_2 = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def load(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Weights:
    config = read_config(folder)
    weight_map = map_weights(config, open_checkpoint(folder))
    return load_weights(config, weight_map, dtype=dtype, device=torch.device(device))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        map_weights(read_config(folder), open_checkpoint(folder))
    return str(caught.value)


def retarget(folder: Path, name: str, file: str | None) -> None:
    """Lets the index place a tensor in another file, or nowhere."""
    index = json.loads((folder / INDEX).read_text())
    if file is None:
        del index["weight_map"][name]
    else:
        index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


# --- C08 -------------------------------------------------------------------------------------------------------------


def test_c08a_shards_hold_the_same_weights(tmp_path: Path) -> None:
    whole, parts = write_rand(tmp_path / "whole"), write_rand(tmp_path / "parts", num_shards=3)
    assert len(open_checkpoint(parts).files) == 3
    assert torch.equal(load(whole).arena, load(parts).arena)
    assert open_checkpoint(parts / INDEX).tensors == open_checkpoint(parts).tensors


def test_c08b_a_shard_is_missing(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", num_shards=3)
    (folder / SHARD_2).unlink()
    message = refusal(folder)
    assert f"{SHARD_2}: the shard is missing; 10 tensors should be in it" in message


def test_c08c_a_stray_file_is_ignored(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", num_shards=3)
    write_tensors(folder / "extra.safetensors", {"model.norm.weight": np.zeros((7, 7), np.float32)})
    assert open_checkpoint(folder).ignored_files == (folder / "extra.safetensors",)
    assert torch.equal(load(folder).arena, load(write_rand(tmp_path / "whole")).arena)


def test_c08d_the_index_is_wrong(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", num_shards=3)
    retarget(folder, "model.norm.weight", SHARD_2)
    message = refusal(folder)
    assert f"{SHARD_2}: tensor model.norm.weight is not in this shard" in message
    assert "tensor model.norm.weight is in this shard, but model.safetensors.index.json places it in" in message
    retarget(folder, "model.norm.weight", None)
    assert "does not know it" in refusal(folder)


def test_c08e_no_weights(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin, which tinyvllm does not read" in refusal(folder)
    with pytest.raises(UserError, match="no such file or folder"):
        open_checkpoint(tmp_path / "elsewhere")


BAD_FILES = ("../outside.safetensors", "/etc/passwd", "..", "", "a\\b", "x\0y", "\ud800", "a" * 300)


@pytest.mark.parametrize("file", BAD_FILES)
def test_c08f_no_way_out_of_the_folder(tmp_path: Path, file: str) -> None:
    folder = write_rand(tmp_path / "m", num_shards=3)
    write_tensors(tmp_path / "outside.safetensors", {"model.norm.weight": np.ones(256, np.float32)})
    retarget(folder, "model.norm.weight", file)
    message = refusal(folder)
    assert "model.norm.weight" in message
    assert "no plain file name" in message
    assert "\0" not in message


def test_an_index_that_is_none(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", num_shards=3)
    edit_json(folder / INDEX, weight_map=...)
    assert "no weight_map" in refusal(folder)
    (folder / INDEX).write_text('{"weight_map": {"a": 3}}')
    assert "no plain file name" in refusal(folder)
    (folder / INDEX).unlink()
    assert "3 .safetensors files, and no model.safetensors.index.json" in refusal(folder)


def test_all_faults_of_all_shards(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", num_shards=3)
    write_raw(folder / SHARD_2, {"x": {"dtype": "X", "shape": [], "data_offsets": [0, 0]}})
    (folder / SHARD_2.replace("00002", "00003")).write_bytes(struct.pack("<Q", 2**63))
    message = refusal(folder)
    assert "unknown dtype X" in message
    assert "9,223,372,036,854,775,808" in message


# --- names -----------------------------------------------------------------------------------------------------------


def test_missing_misshaped_left_over(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m")
    tensors = rand_tensors(llama_config())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.ones(255, np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(256, np.float32)
    tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((512, 256), np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(32, np.float32)
    write_tensors(folder / "model.safetensors", tensors)
    message = refusal(folder)
    assert "4 faults" in message
    assert "tensor model.layers.1.mlp.up_proj.weight [512, 256] is missing" in message
    assert "tensor model.norm.weight has shape [255]; config.json makes it [256]" in message
    assert "tensor model.layers.0.self_attn.q_proj.bias [256] has no place" in message
    assert "tensor model.layers.3.mlp.up_proj.weight [512, 256] has no place" in message
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight"):
        del tensors[name]
    good = rand_tensors(llama_config())
    tensors |= {name: good[name] for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight")}
    write_tensors(folder / "model.safetensors", tensors)
    load(folder)  # inv_freq alone is left over, and harmless


def test_unsupported_dtypes_of_tensors(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m")
    header = {
        name: {"dtype": "F8_E4M3", "shape": list(array.shape), "data_offsets": [0, 0]}
        for name, array in rand_tensors(llama_config()).items()
    }
    end = 0
    for entry in header.values():
        size = int(np.prod(entry["shape"]))
        entry["data_offsets"] = [end, end + size]
        end += size
    write_raw(folder / "model.safetensors", header, bytes(end))
    message = refusal(folder)
    assert "30 faults" in message
    assert "tensor model.embed_tokens.weight is F8_E4M3, which is not supported" in message
    assert "and 10 more" in message


def test_c02_tied_embeddings(tmp_path: Path) -> None:
    maps, loaded = {}, {}
    for variant in ("tied", "tied_copy", "tied_different"):
        folder = write_rand(tmp_path / variant, tied_variant=variant)
        maps[variant] = map_weights(read_config(folder), open_checkpoint(folder))
        loaded[variant] = load(folder)
    for variant in ("tied", "tied_copy"):
        assert maps[variant].tied
        assert not maps[variant].warnings
        assert loaded[variant].lm_head is loaded[variant].embed
    assert torch.equal(loaded["tied"].arena, loaded["tied_copy"].arena)
    assert not maps["tied_different"].tied
    assert "lm_head.weight is used for the logits" in maps["tied_different"].warnings[0]
    head = rand_tensors(llama_config(tied=True), tied_variant="tied_different")["lm_head.weight"]
    assert np.array_equal(loaded["tied_different"].lm_head.numpy(), head)


def test_c02d_untied_and_no_lm_head(tmp_path: Path) -> None:
    message = refusal(write_rand(tmp_path / "m", tied_variant="untied_missing"))
    assert "tensor lm_head.weight [300, 256] is missing" in message
    assert "tie_word_embeddings" in message


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [weights_module.CHUNK_BYTES, 4096])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_lands_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, stored: str, wanted: torch.dtype, chunk: int
) -> None:
    monkeypatch.setattr(weights_module, "CHUNK_BYTES", chunk)
    folder = write_rand(tmp_path / "m", dtype=stored, num_shards=2, layers=2)
    config = read_config(folder)
    stored_dtype = getattr(torch, stored)
    arrays = rand_tensors(llama_config(layers=2, dtype=stored))
    expected = {name: torch.from_numpy(array).to(stored_dtype).to(wanted) for name, array in arrays.items()}
    seen: list[tuple[int, int]] = []
    weight_map = map_weights(config, open_checkpoint(folder))
    target = torch.device(device)
    loaded = load_weights(config, weight_map, dtype=wanted, device=target, progress=lambda *p: seen.append(p))
    assert weight_map.dtype == stored

    def check(tensor: torch.Tensor, *names: str) -> None:
        assert tensor.device.type == device
        assert tensor.data_ptr() % 256 == loaded.arena.data_ptr() % 256
        assert torch.equal(tensor.cpu(), torch.cat([expected[name] for name in names]))

    check(loaded.embed, "model.embed_tokens.weight")
    check(loaded.final_norm, "model.norm.weight")
    check(loaded.lm_head, "lm_head.weight")
    for number, layer in enumerate(loaded.layers):
        prefix = f"model.layers.{number}."
        check(layer.attn_norm, prefix + "input_layernorm.weight")
        check(layer.qkv, *(f"{prefix}self_attn.{part}_proj.weight" for part in "qkv"))
        check(layer.o, prefix + "self_attn.o_proj.weight")
        check(layer.mlp_norm, prefix + "post_attention_layernorm.weight")
        check(layer.gate_up, prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight")
        check(layer.down, prefix + "mlp.down_proj.weight")
    slots, total = weights_layout(config, wanted.itemsize)
    assert loaded.arena.numel() == total
    assert all(slot.offset % 256 == 0 for slot in slots)
    num_bytes = sum(array.size for array in arrays.values()) * stored_dtype.itemsize
    assert seen[-1] == (num_bytes, num_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m")
    config = read_config(folder)
    weight_map = map_weights(config, open_checkpoint(folder))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="has become shorter"):
        load_weights(config, weight_map, dtype=torch.float32, device=torch.device("cpu"))


class _Trickle(io.FileIO):
    """A file that gives 1,000 bytes at a time, as a network may."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:1000]) or 0

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size or 0, 1000))


def test_files_that_come_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers are whole, and equal matrices equal, though their bytes lie at other places."""
    folder = write_rand(tmp_path / "m", tied_variant="tied_copy", layers=8)

    def trickle(path: Path, mode: str, buffering: int = -1) -> Any:
        raw = _Trickle(path, "r")
        return raw if buffering == 0 else io.BufferedReader(raw, 4096)

    for module in ("header", "names"):
        monkeypatch.setattr(f"tinyvllm_cli.checkpoint.{module}.open", trickle, raising=False)
    weight_map = map_weights(read_config(folder), open_checkpoint(folder))
    assert weight_map.tied
    assert weight_map.warnings == ()


def test_more_than_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_rand(tmp_path / "m")
    config = read_config(folder)
    weight_map = map_weights(config, open_checkpoint(folder))
    slots, _ = weights_layout(config, 4)
    monkeypatch.setattr(weights_module, "weights_layout", lambda *_: (slots, 2**60))
    with pytest.raises(UserError, match="the weights need 1,099,511,627,776 MiB"):
        load_weights(config, weight_map, dtype=torch.float32, device=torch.device("cpu"))


def test_there_is_no_second_copy_in_host_memory(tmp_path: Path) -> None:
    """100 MB of bf16 weights: loading may take the arena and the staging buffers, but not the file again."""
    shape = {"vocab": 100_000, "hidden": 512, "heads": 8, "layers": 1}
    folder = write_rand(tmp_path / "m", dtype="bfloat16", tied_variant="tied", **shape)
    config = read_config(folder)
    weight_map = map_weights(config, open_checkpoint(folder))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for dtype in (torch.bfloat16, torch.float32):
        before, most = resident(), [0]
        loaded = load_weights(
            config,
            weight_map,
            dtype=dtype,
            device=torch.device("cpu"),
            progress=lambda *_, most=most: most.append(resident()),
        )
        assert max(most) - before - loaded.arena.nbytes < 64 * 2**20
