"""`inspect --check-data` against numpy and torch on every dtype, --diff, --tensors and --sort."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files import edit_json, write_raw, write_tensors
from models import write_rand
from test_inspect import look, program

from tinyvllm_cli.checkpoint import data as data_module
from tinyvllm_cli.checkpoint.data import PACKED, TensorData, scan_data
from tinyvllm_cli.checkpoint.header import DTYPE_BITS
from tinyvllm_cli.checkpoint.index import open_checkpoint
from tinyvllm_cli.errors import ExitCode, UserError
from tinyvllm_cli.render.inspect import sparkline

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
          "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu}  # fmt: skip
INTEGERS = {"BOOL": "u1", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
            "U64": "<u8", "I64": "<i8"}  # fmt: skip


def scan(tmp_path: Path, dtype: str, content: bytes) -> TensorData:
    """Statistics of a tensor with this content."""
    count = len(content) * 8 // DTYPE_BITS[dtype]
    header = {"x": {"dtype": dtype, "shape": [count], "data_offsets": [0, len(content)]}}
    return scan_data(open_checkpoint(write_raw(tmp_path / "x.safetensors", header, content)))["x"]


@pytest.mark.parametrize("chunk", [64, data_module.CHUNK_BYTES])
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_of_all_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, chunk: int) -> None:
    """Random bit patterns, which hold NaN, infinities, zeros and subnormal numbers; then only finite, only negative."""
    monkeypatch.setattr(data_module, "CHUNK_BYTES", chunk)
    rng = np.random.default_rng(len(dtype))
    bits = rng.integers(0, 256, 4096, dtype=np.uint8)
    bits[:64] = 0xFF  # a first chunk of nothing else
    values = torch.from_numpy(bits).view(FLOATS[dtype]).double()
    finite = torch.isfinite(values)
    positive = finite & (values > 0)
    width = DTYPE_BITS[dtype] // 8
    per_value = bits.reshape(-1, width)
    for wanted in (torch.ones_like(finite), finite, positive, finite & ~positive, ~finite):
        chosen, expected = per_value[wanted.numpy()], values[wanted]
        if not len(chosen):
            continue
        found = scan(tmp_path, dtype, chosen.tobytes())
        good = expected[torch.isfinite(expected)]
        assert found.num_nan == int(expected.isnan().sum())
        assert found.num_inf == int(expected.isinf().sum())
        bad = (~torch.isfinite(expected)).nonzero()
        assert found.first_bad == (int(bad[0]) if len(bad) else None)
        if not len(good):
            assert (found.minimum, found.maximum, found.histogram) == (None, None, ())
            continue
        assert (found.minimum, found.maximum) == (float(good.min()), float(good.max()))
        if np.isfinite(found.maximum - found.minimum):
            expected_histogram, _ = np.histogram(good.numpy(), 16, (found.minimum, found.maximum))
            assert found.histogram == tuple(expected_histogram)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(tmp_path: Path, dtype: str) -> None:
    content = np.random.default_rng(1).integers(0, 2 if dtype == "BOOL" else 256, 4000, dtype=np.uint8)
    values = content.view(INTEGERS[dtype])
    found = scan(tmp_path, dtype, content.tobytes())
    assert (found.minimum, found.maximum) == (int(values.min()), int(values.max()))
    assert (found.num_nan, found.num_inf, sum(found.histogram)) == (0, 0, len(values))


def test_what_has_no_values(tmp_path: Path) -> None:
    assert scan(tmp_path, "F32", b"") == TensorData()
    path = write_raw(tmp_path / "p", {"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"\x12")
    assert scan_data(open_checkpoint(path)) == {}
    assert set(DTYPE_BITS) == {*PACKED, *FLOATS, *INTEGERS, "C64"}
    found = scan(tmp_path, "C64", np.array([1 + 2j, complex(-3, np.inf)], "<c8").tobytes())
    assert (found.minimum, found.maximum, found.num_inf, found.first_bad) == (-3.0, 2.0, 1, 3)


def test_a_sample_of_a_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About as many values as wanted, from all columns of a matrix, whatever the chunks."""
    monkeypatch.setattr(data_module, "SAMPLE_SIZE", 1000)
    values = np.tile(np.arange(64, dtype=np.float32), 4096)
    histograms = set()
    for chunk in (1 << 12, 1 << 16, 1 << 23):
        monkeypatch.setattr(data_module, "CHUNK_BYTES", chunk)
        histograms.add(scan(tmp_path, "F32", values.tobytes()).histogram)
    (histogram,) = histograms
    assert 990 < sum(histogram) < 1100
    assert min(histogram) > 50


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_rand(tmp_path / "m"))
    os.truncate(tmp_path / "m" / "model.safetensors", 100_000)
    with pytest.raises(UserError, match="has become shorter"):
        scan_data(checkpoint)


def test_values_that_are_not_finite_are_faults(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", dtype="bfloat16")
    result, out, err = look(folder, check_data=True)
    assert (result.exit_code, err) == (ExitCode.OK, "")
    assert "model.layers.2.mlp.up_proj.weight" in out
    assert "█" in out
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    tensor = result.checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    start = result.checkpoint.data_start(path) + tensor.begin
    content[start + 2 * (3 * 256 + 7) : start + 2 * (3 * 256 + 9)] = b"\xc0\x7f\x80\xff"
    path.write_bytes(content)
    assert look(folder)[0].exit_code is ExitCode.OK
    result, out, err = look(folder, check_data=True)
    assert result.exit_code is ExitCode.ERROR
    assert "tensor model.layers.1.mlp.up_proj.weight: 1 NaN and 1 infinite values, the first at [3, 7]" in err
    assert "Values" in out
    (entry,) = (t for t in json.loads(look(folder, "json", check_data=True)[1])["tensors"] if t["name"] == tensor.name)
    assert (entry["data"]["num_nan"], entry["data"]["num_inf"], entry["data"]["first_bad"]) == (1, 1, 775)


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyvllm_cli.commands import inspect_data

    clock = iter(range(1000))
    monkeypatch.setattr(inspect_data.time, "monotonic", lambda: next(clock))
    said: list[str] = []
    inspect_data.check_data(open_checkpoint(write_rand(tmp_path / "m")), said.append)
    assert said[-2].startswith("checking data ████████████████████ 0.0 of 0.0 GB")
    assert said[-1] == ""


def test_sparklines() -> None:
    assert sparkline((0, 1, 4, 8)) == " ▁▄█"
    assert sparkline(()) == ""


# --- diff ------------------------------------------------------------------------------------------------------------


def test_diff(tmp_path: Path) -> None:
    a = write_tensors(tmp_path / "a.safetensors", {n: np.zeros((2, 3), np.float32) for n in ("same", "gone", "s", "c")})
    other = {n: np.zeros((2, 3), np.float32) for n in ("same", "new\x1b[2J", "c")} | {"s": np.zeros(6, np.float32)}
    other["c"][1, :2] = 5
    b = write_tensors(tmp_path / "b.safetensors", other)
    result, out, _ = look(a, diff=b)
    assert result.exit_code is ExitCode.OK
    assert result.diff is not None
    assert [t.name for t in result.diff.removed] == ["gone"]
    assert [t.name for t in result.diff.added] == ["new\x1b[2J"]
    assert [(c.old.name, c.num_differing) for c in result.diff.changed] == [("s", None)]
    assert result.diff.num_same == 2
    assert "\x1b" not in out
    assert "names, dtypes and shapes; 2 tensors are the same" in out
    result, out, _ = look(a, diff=b, check_data=True)
    assert result.diff is not None
    assert [(c.old.name, c.num_differing) for c in result.diff.changed] == [("s", None), ("c", 2)]
    assert "2 elements differ" in out
    content = json.loads(look(a, "json", diff=b, check_data=True)[1])["diff"]
    assert content["changed"][1]["num_differing"] == 2
    assert content["num_same"] == 1
    assert "none" in look(a, diff=a)[1]


def test_diff_with_what_is_broken(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m")
    (tmp_path / "b.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="is empty"):
        look(folder, diff=tmp_path / "b.safetensors")


# --- tensors and sort ------------------------------------------------------------------------------------------------


def names(path: Path, **options: Any) -> list[str]:
    return [tensor["name"] for tensor in json.loads(look(path, "json", **options)[1])["tensors"]]


def test_lists_and_orders(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", layers=11, num_shards=2)
    assert len(names(folder)) == 102
    layers = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(11)]
    assert names(folder, tensors="*.mlp.up_proj.*") == layers
    assert names(folder, tensors="*.mlp.up_proj.*", sort="name") == layers
    assert names(folder, sort="size")[0] == "model.layers.0.mlp.down_proj.weight"
    assert names(folder, sort="shape")[-1].startswith("model.layers.9.mlp.")
    assert names(folder, sort="dtype") == sorted(names(folder))
    assert names(folder, tensors="no*such") == []
    _, out, _ = look(folder, tensors="*norm*", sort="file")
    assert "Tensors (23 of 102)" in out


def test_hostile_numbers_in_names(tmp_path: Path) -> None:
    digits = "9" * 5000
    content = {f"a.{n}.b": np.zeros(1, np.float32) for n in ("10", "2", "007", "x", "٣")}
    content["b." + digits] = np.zeros((1, 1), np.float32)
    path = write_tensors(tmp_path / "x.safetensors", content)
    assert names(path, sort="name")[:3] == ["a.2.b", "a.007.b", "a.10.b"]
    assert "a.{2,10}.b" in look(path)[1]
    assert "a.007.b" in look(path)[1]


def test_options_through_the_program(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m")
    listing = ("--tensors", "*norm*", "--sort", "size")
    done = program(folder, *listing, "--memory", "2GiB", "--check-data", "--diff", folder)
    assert done.returncode == 0, done.stderr
    for text in ("Tensors (7 of 30)", "Values", "Memory of a GPU, 2.00 GiB", "(names, dtypes, shapes and contents;"):
        assert text in done.stdout
    assert program("--preset", "tiny-vllm", "--json").stdout.startswith('{"schema": "tinyvllm-inspect-1", "preset"')
    assert program(folder, "--sort", "colour").returncode == ExitCode.USAGE
    assert program(folder, "--memory", "much").returncode == ExitCode.USAGE
    edit_json(folder / "config.json", hidden_act="gelu")
    done = program(folder, "--check-data", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Values" in done.stdout
