"""What the first use of a GPU says when something is missing, on fake tools and a fake device (case C12 a, b, e)."""

from __future__ import annotations

import _ctypes
import os
import shutil
import sysconfig
import time
from pathlib import Path

import pytest
import torch

from cuda_ext import build, cache, toolchain
from tinyvllm_cli.errors import UserError


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def toolkit(home: Path, release: str = "13.0") -> Path:
    """A folder that looks like a CUDA toolkit; returns its nvcc."""
    (home / "include").mkdir(parents=True)
    (home / "include" / "cuda_runtime_api.h").write_text("")
    script = f"case \"$1\" in --version) echo 'Cuda compilation tools, release {release}, V{release}.1';;\n"
    return program(home / "bin" / "nvcc", script + f"--dryrun) echo '#$ TOP={home}/bin/..' >&2;; *) exit 1;; esac")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH, with a compiler and ninja, on a machine without CUDA otherwise."""
    for name in ("c++", "gcc", "ninja"):
        program(tmp_path / "tools" / name, "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "CC", "TORCH_CUDA_ARCH_LIST", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "DEFAULT_HOME", tmp_path / "no-cuda")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "scripts"))
    return tmp_path / "tools"


@pytest.fixture
def gpu(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for CUDA 13.0 that sees an H200, and an empty cache."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.ops, "loaded_libraries", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))


def refusal() -> str:
    with pytest.raises(UserError) as caught:
        build.load_extension()
    assert caught.value.fix.endswith(toolchain.USE_CPU)
    return str(caught.value)


@pytest.mark.usefixtures("gpu")
def test_no_nvcc() -> None:
    message = refusal()
    assert "nvcc was not found on PATH" in message
    assert "CUDA_HOME is not set" in message
    assert "Install the CUDA toolkit" in message


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_cuda_home_without_nvcc(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, str(tmp_path))
    assert f"{variable} is {tmp_path}, which has no bin/nvcc" in refusal()


@pytest.mark.usefixtures("gpu")
def test_toolkit_without_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit(tmp_path / "cuda")
    (tmp_path / "cuda" / "include" / "cuda_runtime_api.h").unlink()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert "cuda_runtime_api.h" in refusal()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("script", ["exit 1", "echo hello"])
def test_nvcc_that_is_none(tools: Path, script: str) -> None:
    program(tools / "nvcc", script)
    assert f"{tools}/nvcc" in refusal()


@pytest.mark.usefixtures("gpu")
def test_nvcc_that_does_not_run(tools: Path) -> None:
    (tools / "nvcc").write_text("\x7fELF")
    (tools / "nvcc").chmod(0o755)
    assert "the program does not run" in refusal()


def test_toolkit_behind_a_script_on_path(tools: Path, tmp_path: Path) -> None:
    nvcc = toolkit(tmp_path / "cuda-13.0")
    program(tools / "nvcc", f'exec {nvcc} "$@"')
    found = toolchain.find_toolkit()
    assert (found.home, found.nvcc, found.release) == (tmp_path / "cuda-13.0", tools / "nvcc", "13.0")


def test_toolkit_in_the_usual_place(tools: Path, tmp_path: Path) -> None:
    toolkit(tmp_path / "no-cuda", "12.9")
    assert toolchain.find_toolkit().release == "12.9"


def test_cuda_home_comes_first(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit(tmp_path / "no-cuda", "12.9")
    toolkit(tmp_path / "own", "13.1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "own"))
    assert toolchain.find_toolkit().home == tmp_path / "own"


@pytest.mark.usefixtures("gpu")
def test_other_major_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit(tmp_path / "cuda", "12.8")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    message = refusal()
    assert "nvcc is of CUDA 12.8" in message
    assert "built for CUDA 13.0" in message


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("missing", ["c++", "gcc", "ninja"])
def test_missing_program(missing: str, tools: Path, tmp_path: Path) -> None:
    toolkit(tmp_path / "no-cuda")
    (tools / missing).unlink()
    message = refusal()
    assert f"{missing} was not found on PATH" in message
    assert "nstall" in message


def test_ninja_beside_python_need_not_be_on_path(tools: Path, tmp_path: Path) -> None:
    (tools / "ninja").unlink()
    own = program(tmp_path / "scripts" / "ninja", "exit 0")
    assert toolchain.find_ninja() == own


def test_cpu_only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    message = refusal()
    assert "is built without CUDA" in message
    assert torch.__version__ in message


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_no_driver(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error("Found no NVIDIA driver on your system.\nPlease check ...")

    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    message = refusal()
    assert "Found no NVIDIA driver on your system." in message
    assert 'CUDA_VISIBLE_DEVICES is "7"' in message


@pytest.mark.usefixtures("gpu")
def test_device_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    message = refusal()
    assert "Tesla T4 has compute capability 7.5 (sm_75)" in message
    assert "8.0 (sm_80)" in message


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("arch_list", ["8.0", "8.6;8.9", "10.0+PTX", "Ada Blackwell", "8.0 12.0a", "rubbish"])
def test_arch_list_of_another_card(arch_list: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch_list.replace("Ada ", "8.9;"))
    message = refusal()
    assert f'TORCH_CUDA_ARCH_LIST is "{os.environ["TORCH_CUDA_ARCH_LIST"]}"' in message
    assert "NVIDIA H200 is 9.0 (sm_90a)" in message


@pytest.mark.parametrize(
    "arch_list", ["9.0", "9.0a", "8.0;9.0+PTX", "8.0 9.0", "8.0+PTX", "native", "Hopper", "Ampere"]
)
def test_arch_list_that_has_the_card(arch_list: str) -> None:
    toolchain.check_capability((9, 0), "NVIDIA H200", arch_list)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100"), ((12, 0), "sm_120")],
)
def test_architecture(capability: tuple[int, int], arch: str) -> None:
    toolchain.check_capability(capability, "some GPU", None)
    assert toolchain.architecture(capability) == arch
    assert toolchain.gencode(arch) == f"-gencode=arch=compute_{arch[3:]},code={arch}"


@pytest.mark.usefixtures("gpu")
def test_first_use_builds_and_later_ones_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole way of load_extension but for the compilers: what is built is a copy of some shared library."""
    toolkit(tmp_path / "no-cuda")

    def build_library(
        name: str, sources: list[Path], cxx_flags: object, nvcc_flags: list[str], folder: Path, *rest: object
    ) -> Path:
        assert "-gencode=arch=compute_90a,code=sm_90a" in nvcc_flags
        assert {path.name for path in sources} >= {"bindings.cpp", "embedding.cu"}
        (folder / "bindings.o").write_text("")
        time.sleep(0.3)
        library = folder / f"{name}.so"
        shutil.copy(_ctypes.__file__, library)
        torch.ops.load_library(str(library))
        return library

    def refuse(*arguments: object) -> Path:
        raise AssertionError("built again")

    lines: list[str] = []
    monkeypatch.setattr(build, "PROGRESS_S", 0.05)
    monkeypatch.setattr(build, "build_library", build_library)
    monkeypatch.setattr(torch.ops, "loaded_libraries", set())
    build.load_extension(lines.append)
    assert lines[0] == "Building the CUDA kernels for sm_90a with nvcc 13.0, once on this machine"
    assert any("1 of" in line for line in lines[1:-1])
    assert lines[-1].startswith("Built the CUDA kernels in")
    published = tmp_path / "cache" / "kernels" / f"{build.library_name('sm_90a')}.so"
    assert published.is_file()

    monkeypatch.setattr(build, "build_library", refuse)
    monkeypatch.setattr(cache, "_load", refuse)
    build.load_extension()  # loaded already: nothing to do


@pytest.mark.usefixtures("gpu")
def test_published_library_needs_no_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second process: neither nvcc nor ninja nor a compiler is there, and none is asked for."""
    published = tmp_path / "cache" / "kernels" / f"{build.library_name('sm_90a')}.so"
    published.parent.mkdir(parents=True)
    shutil.copy(_ctypes.__file__, published)
    monkeypatch.setattr(torch.ops, "loaded_libraries", set())
    begin = time.monotonic()
    build.load_extension()
    assert time.monotonic() - begin < 0.1
    assert torch.ops.loaded_libraries == {str(published)}
