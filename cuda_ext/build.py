"""Builds the CUDA kernels at their first use and loads them; later only loads them.

The library's name holds a digest of all that it depends on, so that what lies in the cache is never out of date.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from cuda_ext import toolchain
from cuda_ext.cache import Report, cache_folder, load_or_build
from tinyvllm_cli.errors import UserError

CXX_FLAGS = ("-O2",)
"""For bindings.cpp. Its C++ standard is left to torch, whose headers decide it."""
PROGRESS_S = 5.0
"""Time between two progress lines."""


def load_extension(progress: Report | None = None) -> None:
    """Makes the CUDA implementations of all ops available, building them when no library fits this machine.

    Args:
        progress: called with one line of text now and then while the build runs, from the calling thread.

    Raises:
        UserError: something is missing for CUDA (it says what, and how to get it), the device in use cannot run the
            kernels, or the build failed.
    """
    arch = device_architecture()
    name = library_name(arch)
    if any(Path(path).stem.startswith(name) for path in torch.ops.loaded_libraries):
        return
    report = progress or (lambda line: None)
    load_or_build(cache_folder() / f"{name}.so", lambda folder: build_kernels(name, arch, folder, report), report)


def device_architecture() -> str:
    """The architecture, such as "sm_90a", of the CUDA device in use.

    Raises:
        UserError: this PyTorch has no CUDA, finds no device, or the device cannot run the kernels.
    """
    if torch.version.cuda is None:
        raise UserError(
            f"this PyTorch ({torch.__version__}) is built without CUDA",
            fix=f"Install a CUDA build of PyTorch, see https://pytorch.org/get-started/locally. {toolchain.USE_CPU}",
        )
    try:
        torch.cuda.init()
        capability, device = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    except (RuntimeError, AssertionError) as error:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if visible is None else f' CUDA_VISIBLE_DEVICES is "{visible}".'
        raise UserError(
            f"PyTorch finds no CUDA device: {str(error).strip().splitlines()[0]}",
            fix=f"Check with nvidia-smi that an NVIDIA driver for CUDA {torch.version.cuda} and a GPU are there."
            f"{hint} {toolchain.USE_CPU}",
        ) from error
    toolchain.check_capability(capability, device, os.environ.get("TORCH_CUDA_ARCH_LIST"))
    return toolchain.architecture(capability)


def library_name(arch: str) -> str:
    """The library's name, which changes with sources, flags, torch, CUDA, Python and architecture."""
    digest = hashlib.sha256()
    flags = [*CXX_FLAGS, *toolchain.NVCC_FLAGS, *map(os.environ.get, ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"))]
    for part in (arch, torch.__version__, torch.version.cuda, sysconfig.get_config_var("SOABI"), *flags):
        digest.update(f"{part}\0".encode())
    for path in toolchain.all_sources():
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return f"tinyvllm_{arch}_{digest.hexdigest()[:16]}"


def build_kernels(name: str, arch: str, folder: Path, report: Report) -> Path:
    """Builds and loads the kernels, after checking that all programs for it are there.

    Raises:
        UserError: a program is missing, nvcc does not fit torch, or the build failed.
    """
    toolkit = toolchain.find_toolkit()
    torch_release = torch.version.cuda or ""
    if toolkit.release.split(".")[0] != torch_release.split(".")[0]:
        raise UserError(
            f"nvcc is of CUDA {toolkit.release}, but this PyTorch is built for CUDA {torch_release}",
            where=str(toolkit.nvcc),
            fix=f"Install the CUDA toolkit {torch_release} and set CUDA_HOME to its folder, or install a PyTorch "
            f"for CUDA {toolkit.release}. {toolchain.USE_CPU}",
        )
    toolchain.find_compiler()
    ninja = toolchain.find_ninja()
    sources = [toolchain.SOURCE_FOLDER / "bindings.cpp", *toolchain.cuda_sources()]
    report(f"Building the CUDA kernels for {arch} with nvcc {toolkit.release}, once on this machine")
    nvcc_flags = (*toolchain.NVCC_FLAGS, toolchain.gencode(arch))
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(build_library, name, sources, CXX_FLAGS, nvcc_flags, folder, ninja, toolkit)
        while not job.done():
            with contextlib.suppress(TimeoutError):
                job.exception(timeout=PROGRESS_S)
            if not job.done():
                done = len(list(folder.glob("*.o")))
                report(f"Building the CUDA kernels: {done} of {len(sources)} files, {time.monotonic() - start:.0f} s")
    library = job.result()
    report(f"Built the CUDA kernels in {time.monotonic() - start:.0f} s")
    return library


def build_library(
    name: str,
    sources: Sequence[Path],
    cxx_flags: Sequence[str],
    nvcc_flags: Sequence[str],
    folder: Path,
    ninja: Path,
    toolkit: toolchain.Toolkit | None = None,
) -> Path:
    """Compiles the sources in parallel (MAX_JOBS at a time, when set), links and loads the library.

    Args:
        name: an identifier; the file is called `name.so`.
        sources: `.cpp` and, with a toolkit, `.cu` files.
        cxx_flags: for the C++ compiler.
        nvcc_flags: for nvcc; must name the architecture.
        folder: an empty folder for all that the build writes.
        ninja: the program, which need not be on PATH.
        toolkit: the CUDA toolkit, None for a library without CUDA.

    Raises:
        UserError: the build failed, or what it made cannot be loaded; it has the first error and the log's path.
    """
    from torch.utils import cpp_extension

    if toolkit is not None:
        cpp_extension.CUDA_HOME = str(toolkit.home)
    try:
        with _on_path(ninja.parent):
            return Path(
                cpp_extension.load(
                    name,
                    [str(source) for source in sources],
                    extra_cflags=list(cxx_flags),
                    extra_cuda_cflags=list(nvcc_flags),
                    build_directory=str(folder),
                    with_cuda=toolkit is not None,
                    is_python_module=False,
                )
            )
    except (RuntimeError, OSError) as error:
        raise _build_failure(f"{error}\n{error.__cause__ or ''}") from error


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """Adds a folder to the end of PATH, where torch looks for ninja."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{before}{os.pathsep}{folder}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _build_failure(output: str) -> UserError:
    """The error for a failed build; the compilers' whole output goes to a file."""
    descriptor, log = tempfile.mkstemp(prefix="tinyvllm-build-", suffix=".log")
    with open(descriptor, "w") as file:
        file.write(output)
    lines = output.strip().splitlines() or ["no output"]
    first = next((line for line in lines if re.search(r"\berror\b|\bfatal\b|undefined|Killed", line)), lines[-1])
    return UserError(
        f"the CUDA kernels could not be built: {first.strip()[:300]}",
        where=log,
        fix=f"That file has the compilers' whole output. With little memory, set MAX_JOBS=1. {toolchain.USE_CPU}",
    )
