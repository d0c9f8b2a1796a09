"""`make kernels` on fake compilers, and the real launchers' refusals where nvcc is at hand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_extension_bindings import declarations
from test_extension_toolchain import program, toolkit

from cuda_ext import check, toolchain
from tinyvllm_cli.memory.plan import SAMPLE_WORKSPACE_FLOATS

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN8tinyvllm12_GLOBAL__N_16kernelILi2EEEvPfi' for 'sm_90a'
ptxas info    : Function properties for _ZN8tinyvllm12_GLOBAL__N_16kernelILi2EEEvPfi
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, {stack} bytes cumulative stack size, {shared}
ptxas info    : Compile time = 12.3 ms
"""


def ptxas(stack: int = 0, stores: int = 0, loads: int = 0, shared: str = "1024 bytes smem") -> str:
    return PTXAS.format(stack=stack, stores=stores, loads=loads, shared=shared)


def test_parse_ptxas() -> None:
    name = "_ZN8tinyvllm12_GLOBAL__N_16kernelILi2EEEvPfi"
    text = ptxas() + ptxas(8, 12, 16, "380 bytes cmem[0]")
    assert check.parse_ptxas(text) == [check.Kernel(name, 40, 1024, 0, 0), check.Kernel(name, 40, 0, 8, 28)]
    assert check.demangled([name]) == {name: "kernel<2>"}
    with pytest.raises(ValueError, match="not the output of ptxas"):
        check.parse_ptxas("Compiling entry function 'f' for 'sm_80'")


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake c++, and a fake nvcc that prints the file `says`, notes calls in `calls` and fails when `fails` exists."""
    home = tmp_path / "cuda"
    nvcc = toolkit(home)
    work = f"""echo "$@" >> {tmp_path}/calls; for last; do :; done; touch "$last"; cat {tmp_path}/says >&2
[ ! -e {tmp_path}/fails ]"""
    nvcc.write_text(nvcc.read_text().replace("exit 1;;", f"{work};;"))
    program(tmp_path / "c++", "exit 0")
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setenv("CUDA_HOME", str(home))
    (tmp_path / "says").write_text(ptxas())
    return tmp_path


def run(folder: Path) -> int:
    return check.main(["--build-folder", str(folder / "build")])


def test_second_run_compiles_nothing(compilers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(compilers) == 0
    first = capsys.readouterr().out
    assert "kernel<2> sm_90a         40    1024      0        0" in first
    assert "all is well" in first
    calls = (compilers / "calls").read_text()
    assert calls.count("-Werror all-warnings") == 2 * len(toolchain.cuda_sources())
    assert calls.count("code=sm_80") == calls.count("code=sm_90a") == len(toolchain.cuda_sources())
    assert run(compilers) == 0
    assert (compilers / "calls").read_text() == calls
    assert capsys.readouterr().out.splitlines()[:-1] == first.splitlines()[:-1]


@pytest.mark.parametrize("fault", [{"stores": 4}, {"loads": 4}, {"stack": 8}])
def test_spill_fails(fault: dict[str, int], compilers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (compilers / "says").write_text(ptxas(**fault))
    assert run(compilers) == 1
    assert "<-- registers in local memory" in capsys.readouterr().out


def test_serialized_products_fail(compilers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    (compilers / "says").write_text(f"{says}\n{ptxas()}")
    assert run(compilers) == 1
    assert "waits for each product" in capsys.readouterr().err


def test_compile_error_fails_and_is_not_kept(compilers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (compilers / "says").write_text("embedding.cu(7): error: something")
    (compilers / "fails").write_text("")
    assert run(compilers) == 1
    captured = capsys.readouterr()
    assert "embedding.cu for sm_80 does not compile" in captured.err
    assert "FAILED" in captured.out
    (compilers / "fails").unlink()
    (compilers / "says").write_text(ptxas())
    assert run(compilers) == 0


def test_bindings_error_fails(compilers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(compilers / "c++", "echo some error; exit 1")
    assert run(compilers) == 1
    assert "bindings.cpp does not compile:\nsome error" in capsys.readouterr().err


def test_without_nvcc_it_says_what_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert check.main([]) == 2
    assert check.main(["--allow-missing"]) == 0
    assert capsys.readouterr().err.count("Not checked: that the CUDA kernels") == 2


HAS_NVCC = bool(os.environ.get("CUDA_HOME") or shutil.which("nvcc") or toolchain.DEFAULT_HOME.exists())

BAD_CALLS = [
    *(("dtype", dtype) for dtype in (0, 7, -1)),
    ("head_dim", 96),
    ("head_dim", 0),
    ("num_kv_heads", 0),
    ("block_size", 0),
    ("num_splits", 0),
    ("min_warps", 0),
    ("out_dtype", 7),
]
"""A parameter's value that no launcher which has the parameter supports; the other arguments are fine."""

BAD_CALLS_OF = {
    "matvec": [("num_rows", 9)],
    "linear_hopper": [("num_rows", 129), ("in_features", 12)],
    "add_linear_hopper": [("num_rows", 129), ("in_features", 12), ("out_features", 12)],
    "gated_linear_hopper": [("num_rows", 129), ("in_features", 12), ("out_features", 12)],
    "gated_linear_wide": [("num_rows", 0), ("in_features", 12), ("out_features", 12)],
    "linear_wide": [("num_rows", 0), ("in_features", 12), ("out_features", 12)],
    "add_linear_wide": [("num_rows", 0), ("in_features", 12), ("out_features", 12)],
    "argmax_linear_hopper": [("num_rows", 257), ("in_features", 12)],
    "attention_decode": [("num_heads", 7)],
    "attention_prefill": [("num_heads", 7)],
    "decode_step": [
        *(("num_rows", 9), ("num_heads", 7), ("num_kv_heads", 0), ("head_dim", 96), ("hidden_size", 12)),
        *(("workspace_words", 64), ("num_stages", 7)),
    ],
}
"""The same for one launcher only."""

SHAPE = ("num_layers", "hidden_size", "intermediate_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim")
"""The fields of LlamaShape."""

CALL_LAUNCHERS = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
layers = (ctypes.c_void_p * 6)(*range(1 << 20, 7 << 20, 1 << 20))
kinds = {
    "p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float,
    "shape": lambda value: ctypes.byref((ctypes.c_int * len(value))(*value)),
    "weights": lambda value: ctypes.byref((ctypes.c_void_p * 4)(value, ctypes.addressof(layers), value, value)),
}
for symbol, arguments in json.load(sys.stdin):
    print(getattr(library, symbol)(*(kinds[kind](value) for kind, value in arguments)))
"""


def arguments_of(launcher: str, **changed: int) -> list[tuple[str, Any]]:
    """Kind and value of each argument of a call that a launcher should accept, but for what is changed."""
    values = {"dtype": 2, "out_dtype": 2, "head_dim": 64, "num_heads": 8, "num_kv_heads": 2, "block_size": 16}
    values |= {"num_rows": 4, "hidden_size": 256, "in_features": 256, "out_features": 256, "intermediate_size": 256}
    values |= {"q_stride": 768, "table_stride": 8, "num_splits": 2, "vocab_size": 1000, "workspace_words": 1 << 20}
    values |= changed
    given: list[tuple[str, Any]] = []
    for position, (kind, name) in enumerate(declarations()[launcher]):
        if kind == "const LlamaShape&":
            given.append(("shape", [values.get(field, 1) for field in SHAPE]))
        elif kind == "const LlamaWeights&":
            given.append(("weights", (position + 1) << 20))
        elif "*" in kind:
            given.append(("p", (position + 1) << 20))
        elif kind == "cudaStream_t":
            given.append(("p", 0))
        else:
            given.append(({"float": "f", "int64_t": "l"}.get(kind, "i"), values.get(name, 1)))
    return given


def link(folder: Path) -> tuple[Path, dict[str, str]]:
    """All launchers in one library, from the objects of `make kernels`, and the symbol of each."""
    tools, sources = toolchain.find_toolkit(), toolchain.cuda_sources()
    objects = toolchain.SOURCE_FOLDER.parent / "build" / "kernels"
    objects.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for ok, printed in pool.map(lambda source: check.compile_kernels(source, "sm_80", tools, objects), sources):
            assert ok, printed
    library = folder / "launchers.so"
    files = [str(objects / f"{source.stem}.sm_80.o") for source in sources]
    subprocess.run([str(tools.nvcc), "-shared", "-o", str(library), *files], check=True)
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    mangled = [line.split()[2] for line in listed.splitlines() if "tinyvllm" in line]
    plain = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    names = [line.split("(")[0].removeprefix("tinyvllm::") for line in plain.splitlines()]
    return library, dict(zip(names, mangled, strict=True))


def test_launchers_refuse_what_they_do_not_support(tmp_path: Path) -> None:
    """With no device in sight: a good call gets as far as to miss it, a bad one is cudaErrorInvalidValue (1) before."""
    if not HAS_NVCC:
        assert check.main(["--allow-missing"]) == 0
        return
    library, symbols = link(tmp_path)
    good = [(name, arguments_of(name)) for name in declarations()]
    bad = [
        (name, parameter, value)
        for name, parameters in declarations().items()
        for parameter, value in [*BAD_CALLS, *BAD_CALLS_OF.get(name, [])]
        if (parameter, value) in BAD_CALLS_OF.get(name, []) or parameter in {known for _, known in parameters}
    ]
    calls = good + [(name, arguments_of(name, **{parameter: value})) for name, parameter, value in bad]
    calls.append(("sample_workspace_floats", []))
    done = subprocess.run(
        [sys.executable, "-c", CALL_LAUNCHERS, str(library)],
        input=json.dumps([(symbols[name], given) for name, given in calls]),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *results, workspace_floats = [int(line) for line in done.stdout.split()]
    assert len(results) == len(good) + len(bad)
    assert 0 < workspace_floats <= SAMPLE_WORKSPACE_FLOATS
    refused = {name for (name, _), result in zip(good, results, strict=False) if result in (0, 1)}
    assert not refused, "good calls that are refused, or that succeed without a device"
    accepted = [call for call, result in zip(bad, results[len(good) :], strict=True) if result != 1]
    assert not accepted, "bad calls that are not refused"
