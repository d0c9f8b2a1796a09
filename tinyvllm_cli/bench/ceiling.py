"""What this machine can do at best: reading memory, and matrix products in the model's dtype. Measured, not looked
up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CUDA_READ_BYTES, CPU_READ_BYTES = 2 * 2**30, 128 * 2**20
COLUMNS = 4096
CUDA_MATMUL, CPU_MATMUL = (4096, 8192), (1024,)
REPETITIONS, QUEUED = 7, 4


def measure_ceiling(device: torch.device, dtype_name: str) -> dict[str, Any]:
    """Reading bandwidth (bytes/s) and matmul rate (FLOP/s), each the best of several ways, named beside it.

    Takes up to 4.5 GiB of device memory on CUDA for a second, less where less is free. On CUDA the extension must be
    loaded.
    """
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    reading, copying = _reading(device, dtype)
    matmul = _matmul(device, dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "read_bytes_per_second": max(reading.values()),
        "read_by": reading,
        "copy_bytes_per_second": copying,
        "matmul_flops_per_second": max(matmul.values()),
        "matmul_by": matmul,
        "matmul_dtype": dtype_name,
    }


def _reading(device: torch.device, dtype: torch.dtype) -> tuple[dict[str, float], float]:
    """Bytes a second of reading by several ways, and of copying (bytes read and written)."""
    import torch

    cuda = device.type == "cuda"
    nbytes = min(CUDA_READ_BYTES, torch.cuda.mem_get_info(device)[0] // 4) if cuda else CPU_READ_BYTES
    matrix = torch.empty(nbytes // dtype.itemsize // COLUMNS, COLUMNS, device=device, dtype=dtype).normal_()
    vector, out = torch.ones_like(matrix[0]), torch.empty_like(matrix[:, 0].contiguous())
    words = matrix.view(torch.float32)
    ways: dict[str, Callable[[], object]] = {
        "sum": words.sum,
        "max": words.amax,
        "matrix x vector": lambda: torch.mv(matrix, vector, out=out),
    }
    if cuda and dtype != torch.float32:
        from tinyvllm_cli import ops

        ways["ops.matvec"] = lambda: ops.matvec(out.view(1, -1), vector.view(1, -1), matrix)
    reading = {name: matrix.nbytes / _seconds(way, device) for name, way in ways.items()}
    target = torch.empty_like(matrix)
    return reading, 2 * matrix.nbytes / _seconds(lambda: target.copy_(matrix), device)


def _matmul(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Operations a second of square products x @ w.T of random numbers, by size."""
    return {
        f"{size}^3": _matmul_rate(size, device, dtype)
        for size in (CUDA_MATMUL if device.type == "cuda" else CPU_MATMUL)
    }


def _matmul_rate(size: int, device: torch.device, dtype: torch.dtype) -> float:
    import torch

    x, w, out = (torch.empty(size, size, device=device, dtype=dtype).normal_() for _ in range(3))
    return 2 * size**3 / _seconds(lambda: torch.mm(x, w.t(), out=out), device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of one call, after one to warm up; on CUDA by events around several queued calls."""
    import torch

    work()
    samples = []
    for _ in range(REPETITIONS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            start.record()
            for _ in range(QUEUED):
                work()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3 / QUEUED)
        else:
            began = time.perf_counter()
            work()
            samples.append(time.perf_counter() - began)
    return statistics.median(samples)
