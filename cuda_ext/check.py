"""Compiles the kernels without a GPU: `python -m cuda_ext.check`, behind `make kernels`.

Every `.cu` is compiled for sm_80 and sm_90a with warnings as errors; what ptxas says about each kernel is printed as a
table. Spilled registers, a stack frame, and warpgroup products that cannot overlap fail the check. bindings.cpp is
compiled for its syntax and warnings. What has not changed since the last run is taken from the build folder.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cuda_ext.toolchain import (
    NVCC_FLAGS,
    SOURCE_FOLDER,
    Toolkit,
    all_sources,
    cuda_sources,
    find_compiler,
    find_toolkit,
    gencode,
)
from tinyvllm_cli.errors import UserError

ARCHITECTURES = ("sm_80", "sm_90a")
WARNING_FLAGS = ("-Werror", "all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror,-fPIC", "-Xptxas=-v,-Werror")


@dataclass(frozen=True)
class Kernel:
    """What ptxas reports about one kernel on one architecture; all but registers are in bytes."""

    name: str
    registers: int
    shared: int
    stack: int
    spilled: int


def parse_ptxas(text: str) -> list[Kernel]:
    """The kernels in the output of `ptxas -v`, names still mangled."""
    kernels = []
    for part in re.split(r"Compiling entry function '", text)[1:]:
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        if stack is None or registers is None:
            raise ValueError(f"not the output of ptxas -v: {part[:200]}")
        kernels.append(
            Kernel(
                name=part.split("'")[0],
                registers=int(registers[1]),
                shared=int(shared[1]) if shared else 0,
                stack=int(stack[1]),
                spilled=int(stack[2]) + int(stack[3]),
            )
        )
    return kernels


def run_cached(command: Sequence[str], inputs: Sequence[Path], record: Path, output: Path | None) -> tuple[bool, str]:
    """Runs a compiler unless the record says that the same command on the same inputs succeeded before.

    Returns:
        Whether it succeeded, and what it printed.
    """
    digest = hashlib.sha256("\0".join(command).encode())
    for path in inputs:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    key = digest.hexdigest()
    if record.is_file() and (output is None or output.is_file()):
        stored = json.loads(record.read_text())
        if stored["key"] == key:
            return True, stored["printed"]
    done = subprocess.run(command, capture_output=True, text=True)
    printed = done.stdout + done.stderr
    if done.returncode == 0:
        part = record.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"key": key, "printed": printed}))
        part.replace(record)
    return done.returncode == 0, printed


def compile_kernels(source: Path, arch: str, toolkit: Toolkit, folder: Path) -> tuple[bool, str]:
    """Compiles one `.cu` for one architecture into `folder/STEM.ARCH.o`; returns success and what was printed."""
    output = folder / f"{source.stem}.{arch}.o"
    command = [str(toolkit.nvcc), *NVCC_FLAGS, *WARNING_FLAGS, gencode(arch), "-c", str(source), "-o", str(output)]
    headers = [path for path in all_sources() if path.suffix in {".h", ".cuh"}]
    return run_cached(command, [source, *headers], output.with_suffix(".json"), output)


def compile_bindings(toolkit: Toolkit, folder: Path) -> tuple[bool, str]:
    """Compiles bindings.cpp for its syntax against the installed torch, be it CUDA or CPU-only."""
    package = importlib.util.find_spec("torch")
    if package is None or package.origin is None:
        return False, "torch is not installed"
    torch_folder = Path(package.origin).parent
    include = torch_folder / "include"
    # A CPU-only torch lacks one header that its build generates.
    stub = folder / "stub" / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    stub.parent.mkdir(parents=True, exist_ok=True)
    stub.write_text("#pragma once\n")
    system = [include, include / "torch" / "csrc" / "api" / "include", toolkit.home / "include", folder / "stub"]
    command = [*find_compiler().split(), "-fsyntax-only", "-std=c++20", "-Wall", "-Wextra", "-Werror"]
    command += [argument for path in system for argument in ("-isystem", str(path))]
    bindings = SOURCE_FOLDER / "bindings.cpp"
    inputs = [bindings, SOURCE_FOLDER / "call.h", SOURCE_FOLDER / "launch.h", torch_folder / "version.py"]
    return run_cached([*command, str(bindings)], inputs, folder / "bindings.json", None)


def demangled(names: Sequence[str]) -> dict[str, str]:
    """Readable kernel names: without return type, namespaces and parameters."""
    printed = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout
    plain = [line.replace("(anonymous namespace)::", "").replace("tinyvllm::", "") for line in printed.splitlines()]
    short = [re.sub(r"^void |\((?:[^()]|\([^()]*\))*\)$", "", line) for line in plain]
    return dict(zip(names, short, strict=True))


def check(folder: Path) -> bool:
    """Compiles everything in parallel, prints the table and the faults; returns whether all is well."""
    toolkit = find_toolkit()
    find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    good = True
    rows: list[tuple[str, str, Kernel]] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        bindings = pool.submit(compile_bindings, toolkit, folder)
        jobs = [(source, arch) for source in cuda_sources() for arch in ARCHITECTURES]
        for (source, arch), (ok, printed) in zip(
            jobs, pool.map(lambda job: compile_kernels(job[0], job[1], toolkit, folder), jobs), strict=True
        ):
            if not ok:
                good = False
                print(f"{source.name} for {arch} does not compile:\n{printed}", file=sys.stderr)
                continue
            if "wgmma.mma_async instructions are serialized" in printed:  # for ptxas not even a warning
                good = False
                print(
                    f"{source.name} for {arch} waits for each product before it starts the next:\n{printed}",
                    file=sys.stderr,
                )
            rows += [(source.name, arch, kernel) for kernel in parse_ptxas(printed)]
        ok, printed = bindings.result()
        if not ok:
            good = False
            print(f"bindings.cpp does not compile:\n{printed}", file=sys.stderr)
    names = demangled(sorted({kernel.name for _, _, kernel in rows}))
    width = max((len(name) for name in names.values()), default=0)
    print(f"{'file':22} {'kernel':{width}} {'arch':7} registers  shared  stack  spilled")
    for file, arch, kernel in sorted(rows, key=lambda row: (row[0], names[row[2].name], row[1])):
        mark = "  <-- registers in local memory" if kernel.stack or kernel.spilled else ""
        good = good and not mark
        print(
            f"{file:22} {names[kernel.name]:{width}} {arch:7} {kernel.registers:9} {kernel.shared:7} {kernel.stack:6} "
            f"{kernel.spilled:8}{mark}"
        )
    verdict = "all is well" if good else "FAILED"
    print(
        f"{len(cuda_sources())} files for {' and '.join(ARCHITECTURES)}, and bindings.cpp, with nvcc {toolkit.release} "
        f"in {time.monotonic() - start:.1f} s: {verdict}"
    )
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 all is well, 1 a file fails, 2 there is no compiler (0 with --allow-missing)."""
    parser = argparse.ArgumentParser(prog="python -m cuda_ext.check", description=__doc__.splitlines()[0])
    parser.add_argument("--allow-missing", action="store_true", help="succeed, with a note, on a machine without nvcc")
    parser.add_argument("--build-folder", type=Path, default=SOURCE_FOLDER.parent / "build" / "kernels")
    options = parser.parse_args(arguments)
    try:
        return 0 if check(options.build_folder) else 1
    except UserError as error:
        print(f"{error}\nNot checked: that the CUDA kernels and bindings.cpp compile, without spills.", file=sys.stderr)
        return 0 if options.allow_missing else 2


if __name__ == "__main__":
    sys.exit(main())
