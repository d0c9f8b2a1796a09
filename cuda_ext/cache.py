"""Where built libraries are kept, and how one is published so that nothing half done is ever seen.

A build runs in a private folder and is published by one rename: a killed build, or two at once, are harmless. The lock
only keeps processes from doing the same work twice; the operating system drops it when its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from tinyvllm_cli.errors import UserError

Report = Callable[[str], None]

PATIENCE_S = 180.0
"""How long to wait for another process' build before building a second time."""


def cache_folder() -> Path:
    """The folder `kernels` in TINYVLLM_CACHE, else in XDG_CACHE_HOME/tinyvllm, else in ~/.cache/tinyvllm."""
    if own := os.environ.get("TINYVLLM_CACHE"):
        return Path(own).absolute() / "kernels"
    if os.path.isabs(xdg := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(xdg) / "tinyvllm" / "kernels"
    try:
        return Path.home() / ".cache" / "tinyvllm" / "kernels"
    except RuntimeError as error:
        raise UserError("there is no home folder for the cache", fix="Set TINYVLLM_CACHE to a folder.") from error


def load_or_build(library: Path, build: Callable[[Path], Path], report: Report) -> None:
    """Loads the published library, or builds and publishes it.

    Args:
        library: the published file; its folder is made when needed, and need not be writable once the file is there.
        build: builds in the empty folder given to it, loads what it built, and returns the file.
        report: takes a line for the user.
    """
    if _load(library):
        return
    with contextlib.ExitStack() as stack:
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(library.with_suffix(".lock").open("a"))
            locked = _lock(lock, report)
            if _load(library):
                return
            if locked:  # then what other builds left here belongs to killed ones
                for folder in library.parent.glob(f"{library.stem}.build-*"):
                    shutil.rmtree(folder, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix=f"{library.stem}.build-", dir=library.parent))
        except OSError as error:
            report(
                f"The cache folder {library.parent} cannot be written ({error.strerror}): building in a temporary "
                "folder, and again at the next start. Set TINYVLLM_CACHE to a folder that can be written."
            )
            folder = Path(tempfile.mkdtemp(prefix="tinyvllm-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        built = build(folder)
        if folder.parent == library.parent:
            _publish(built, library, report)


def _publish(built: Path, library: Path, report: Report) -> None:
    """Moves the loaded file to its published name; without success there is only the next build to pay for."""
    try:
        with built.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(built, library)
    except OSError as error:
        report(f"The built kernels could not be kept in {library} ({error.strerror})")


def _load(library: Path) -> bool:
    """Loads a published library; False when it is not there or damaged."""
    if not _is_whole(library):
        return False
    try:
        torch.ops.load_library(str(library))
    except OSError:
        return False
    return True


def _is_whole(library: Path) -> bool:
    """Whether an ELF file has all its bytes: its section headers come last. Loading a cut one can kill the process."""
    try:
        with library.open("rb") as file:
            head = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(head) < 64 or not head.startswith(b"\x7fELF"):
        return False
    (offset,) = struct.unpack_from("<Q", head, 40)
    entry_size, count = struct.unpack_from("<HH", head, 58)
    return bool(offset + entry_size * count <= size)


def _lock(lock: IO[str], report: Report) -> bool:
    """Waits for the lock; False when the file system has none, or its holder takes longer than PATIENCE_S."""
    give_up = time.monotonic() + PATIENCE_S
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > give_up:
                report(f"The process that holds {lock.name} is not done: building beside it")
                return False
        except OSError:
            return False
        if not told:
            report(f"Waiting for another process that builds the CUDA kernels (it holds {lock.name})")
            told = True
        time.sleep(0.1)
