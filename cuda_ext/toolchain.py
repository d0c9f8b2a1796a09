"""What building the kernels needs: nvcc, a C++ compiler, ninja, and an architecture. Standard library only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tinyvllm_cli.errors import UserError

SOURCE_FOLDER = Path(__file__).resolve().parent
NVCC_FLAGS = (
    "-O3",
    "-std=c++17",
    "--expt-relaxed-constexpr",
    # torch.utils.cpp_extension sets these; they are here so that `make kernels` compiles the same as a user's machine.
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
)
MIN_CAPABILITY = (8, 0)
USE_CPU = "Or run on the CPU with --device cpu."
DEFAULT_HOME = Path("/usr/local/cuda")

_FAMILIES = {
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}
"""Names that TORCH_CUDA_ARCH_LIST may use, and the versions they stand for."""


@dataclass(frozen=True)
class Toolkit:
    """An installed CUDA toolkit: its folder, its compiler, and its release such as "13.0"."""

    home: Path
    nvcc: Path
    release: str


def cuda_sources() -> list[Path]:
    """All `.cu` files, sorted by name."""
    return sorted(SOURCE_FOLDER.glob("*.cu"))


def all_sources() -> list[Path]:
    """Every file that the built library depends on, sorted by name."""
    return sorted(path for path in SOURCE_FOLDER.iterdir() if path.suffix in {".cu", ".cuh", ".h", ".cpp"})


def architecture(capability: tuple[int, int]) -> str:
    """The architecture that kernels are built for on a device of this compute capability, such as "sm_86"."""
    major, minor = capability
    return f"sm_{major}{minor}a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def gencode(arch: str) -> str:
    """The nvcc flag that makes machine code for "sm_90a" and nothing else."""
    return f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}"


def check_capability(capability: tuple[int, int], device: str, arch_list: str | None) -> None:
    """Refuses a device that the kernels cannot run on, or that TORCH_CUDA_ARCH_LIST leaves out.

    Args:
        capability: compute capability of the device in use.
        device: the device's name, for the message.
        arch_list: the value of TORCH_CUDA_ARCH_LIST, None when unset.

    Raises:
        UserError: naming both architectures.
    """
    major, minor = capability
    if capability < MIN_CAPABILITY:
        raise UserError(
            f"{device} has compute capability {major}.{minor} (sm_{major}{minor}); the kernels need "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} (sm_{MIN_CAPABILITY[0]}{MIN_CAPABILITY[1]}) or newer",
            fix=f"Use an Ampere GPU or newer. {USE_CPU}",
        )
    if arch_list and not _covers(arch_list, capability):
        raise UserError(
            f'TORCH_CUDA_ARCH_LIST is "{arch_list}", which leaves out the device in use: {device} is {major}.{minor} '
            f"({architecture(capability)})",
            fix=f'Unset TORCH_CUDA_ARCH_LIST, or set it to "{major}.{minor}". {USE_CPU}',
        )


def _covers(arch_list: str, capability: tuple[int, int]) -> bool:
    """Whether code built for the list would run on the device: same major version, or PTX of an older one."""
    for family, versions in _FAMILIES.items():
        arch_list = arch_list.replace(family, versions)
    for entry in re.split(r"[;,\s]+", arch_list):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", entry)
        if entry == "native":
            return True
        if match is None:
            continue
        version = int(match[1]), int(match[2])
        if version == capability:
            return True
        if not match[3] and version < capability and (match[4] or version[0] == capability[0]):
            return True
    return False


def find_toolkit() -> Toolkit:
    """The CUDA toolkit in CUDA_HOME or CUDA_PATH, else that of the nvcc on PATH, else /usr/local/cuda.

    Raises:
        UserError: no nvcc, one that does not run, or a toolkit without the runtime's headers.
    """
    fix = f"Install the CUDA toolkit (nvcc and its headers) and set CUDA_HOME to its folder. {USE_CPU}"
    variable = next((name for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)), None)
    if variable:
        nvcc = Path(os.environ[variable]) / "bin" / "nvcc"
        if not nvcc.is_file():
            raise UserError(f"{variable} is {os.environ[variable]}, which has no bin/nvcc", fix=fix)
    else:
        found = shutil.which("nvcc")
        nvcc = Path(found) if found else DEFAULT_HOME / "bin" / "nvcc"
        if not nvcc.is_file():
            raise UserError(f"nvcc was not found on PATH or in {DEFAULT_HOME}/bin, and CUDA_HOME is not set", fix=fix)
    release = re.search(r"release (\d+\.\d+)", _output_of(nvcc, "--version"))
    if release is None:
        raise UserError("`nvcc --version` does not name a CUDA release", where=str(nvcc), fix=fix)
    home = Path(os.environ[variable]) if variable else _home_of(nvcc)
    if not (home / "include" / "cuda_runtime_api.h").is_file():
        raise UserError("include/cuda_runtime_api.h of the CUDA runtime is missing", where=str(home), fix=fix)
    return Toolkit(home, nvcc, release[1])


def _home_of(nvcc: Path) -> Path:
    """The toolkit's folder. nvcc itself knows it: what is on PATH may be a script or a link that stands elsewhere."""
    top = re.search(r"^#\$ TOP=(.+)$", _output_of(nvcc, "--dryrun", "-x", "cu", os.devnull), re.MULTILINE)
    return Path(top[1].strip()).resolve() if top else nvcc.resolve().parent.parent


def _output_of(program: Path, *arguments: str) -> str:
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"the program does not run: {error}", where=str(program), fix=USE_CPU) from error
    return done.stdout + done.stderr


def find_compiler() -> str:
    """The C++ compiler: CXX, else c++; nvcc needs gcc beside it.

    Raises:
        UserError: naming what is missing.
    """
    compiler = os.environ.get("CXX") or "c++"
    for program in (compiler, os.environ.get("CC") or "gcc"):
        if shutil.which(program.split()[0]) is None:
            raise UserError(
                f"the C++ compiler {program} was not found on PATH",
                fix=f"Install g++ (Debian, Ubuntu: apt-get install g++). {USE_CPU}",
            )
    return compiler


def find_ninja() -> Path:
    """The ninja on PATH, else the one that pip put beside this Python, whose folder need not be on PATH.

    Raises:
        UserError: there is none.
    """
    found = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
    if found is None:
        raise UserError(
            "ninja was not found on PATH; it runs the compilers",
            fix=f"Install it with `pip install ninja`. {USE_CPU}",
        )
    return Path(found)
