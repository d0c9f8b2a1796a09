"""Where numbers were made: machine, card, versions, commit, clocks."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")
CLOCKS = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_throttle_reasons.active"


def describe(device: torch.device) -> dict[str, Any]:
    """All that does not change while measuring."""
    import torch

    from tinyvllm_cli import __version__

    environment: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tinyvllm": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "os": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": device.type,
        "command": sys.argv[1:],
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        environment |= {
            "card": properties.name,
            "card_memory": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": _nvidia_smi("driver_version", device),
        }
    return environment


def clocks(device: torch.device) -> dict[str, str] | None:
    """Clocks, temperature, power and throttling of the card now; None on the CPU or without nvidia-smi."""
    answer = _nvidia_smi(CLOCKS, device) if device.type == "cuda" else None
    return dict(zip(CLOCKS.split(","), answer.split(", "), strict=False)) if answer else None


def _nvidia_smi(query: str, device: torch.device) -> str | None:
    import torch

    if shutil.which("nvidia-smi") is None:
        return None
    card = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={card}"]
    return _output(command)


def _commit() -> str | None:
    """The commit of the source tree, with "+" when it was changed; None for an installed package."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        return None
    commit = _output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}+" if commit and changed else commit


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _output(command: list[str]) -> str | None:
    """What a command prints, None when it cannot be run, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
