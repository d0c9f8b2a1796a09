"""The GPU that CUDA would take, found through the driver's own library (NVML): no torch, no process started."""

from __future__ import annotations

import ctypes
import os

from tinyvllm_cli.memory.budget import Device

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
_LIBRARY = "libnvidia-ml.so.1"
_VERSION_2 = 2 << 24


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t: `total` includes what the driver reserves, which no program can have."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def find_gpu(visible: str | None, library: str = _LIBRARY) -> Device | None:
    """The first GPU, or None when there is none that can be used.

    visible: CUDA_VISIBLE_DEVICES, numbers or UUIDs; None when it is not set.
    """
    first = None if visible is None else visible.split(",")[0].strip()
    if first in ("", "-1") or (library == _LIBRARY and not any(map(os.path.exists, _DRIVERS))):
        return None
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2():
            return None
    except (OSError, AttributeError):
        return None
    try:
        return _query(nvml, first or "0")
    except AttributeError:  # a driver too old for one of the functions
        return None
    finally:
        nvml.nvmlShutdown()


def _query(nvml: ctypes.CDLL, which: str) -> Device | None:
    handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Memory()
    memory.version = ctypes.sizeof(_Memory) | _VERSION_2
    if which.isascii() and which.isdigit():
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(which)), ctypes.byref(handle))
    else:
        failed = nvml.nvmlDeviceGetHandleByUUID(which.encode(), ctypes.byref(handle))
    if failed or nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name))):
        return None
    if nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)):
        return None
    return Device(name.value.decode("utf-8", "replace"), True, memory.total - memory.reserved, memory.free)
