"""Building the extension (case C12): what is missing is named, and no crash, race or damaged file does harm.

The code under test builds a trivial C++ library here: ninja, cache, lock and publication are real, CUDA is not needed.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from cuda_ext import build, cache, toolchain
from tinyvllm_cli.errors import UserError

ROOT = toolchain.SOURCE_FOLDER.parent
BUILD_TRIVIAL = """
    import os, sys, time
    from pathlib import Path
    from cuda_ext import build, cache, toolchain

    library = Path(sys.argv[1])
    def compile_trivial(folder):
        (folder / "half").write_text("half done")
        print("building", flush=True)
        if len(sys.argv) > 2:
            time.sleep(600)
        (folder / "trivial.cpp").write_text('extern "C" int answer() { return 42; }')
        ninja = toolchain.find_ninja()
        return build.build_library(library.stem, [folder / "trivial.cpp"], ["-O1"], [], folder, ninja)

    cache.load_or_build(library, compile_trivial, lambda line: print(line, flush=True))
    import ctypes, torch
    assert any(Path(path).name == library.name for path in torch.ops.loaded_libraries)
    print("loaded", flush=True)
"""


def start(library: Path, *extra: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A process that makes the trivial library available, and says on stdout what it does."""
    command = [sys.executable, "-c", textwrap.dedent(BUILD_TRIVIAL), str(library), *extra]
    environment = {**os.environ, **(env or {})}
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    return printed.splitlines()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published library, built once."""
    library = tmp_path_factory.mktemp("published") / "kernels" / "trivial.so"
    assert finish(start(library)) == ["building", "loaded"]
    return library


@pytest.fixture
def library(published: Path, tmp_path: Path) -> Path:
    """A copy of the published library in a cache folder of its own."""
    copy = tmp_path / "kernels" / published.name
    copy.parent.mkdir()
    copy.write_bytes(published.read_bytes())
    return copy


def refuse(folder: Path) -> Path:
    raise AssertionError("built again")


def test_a_build_leaves_the_library_and_its_lock(published: Path) -> None:
    assert sorted(path.name for path in published.parent.iterdir()) == ["trivial.lock", "trivial.so"]


def test_published_library_is_only_loaded(library: Path) -> None:
    begin = time.monotonic()
    cache.load_or_build(library, refuse, print)
    assert time.monotonic() - begin < 0.1
    assert [path.name for path in library.parent.iterdir()] == ["trivial.so"]


@pytest.mark.parametrize("size", [0, 10, 64, 5000, -1])
def test_half_written_library_is_built_again(library: Path, size: int) -> None:
    whole = library.read_bytes()
    library.write_bytes(whole[:size])
    assert finish(start(library)) == ["building", "loaded"]
    assert len(library.read_bytes()) == len(whole)


def test_file_that_is_no_library_is_built_again(library: Path) -> None:
    library.write_text("<html>not found</html>" * 10)
    assert finish(start(library)) == ["building", "loaded"]


def test_killed_build_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    library = tmp_path / "trivial.so"
    killed = start(library, "hang")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "building\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert list(tmp_path.glob("trivial.build-*/half"))
    begin = time.monotonic()
    assert finish(start(library)) == ["building", "loaded"]
    assert time.monotonic() - begin < 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trivial.lock", "trivial.so"]


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    library = tmp_path / "kernels" / "trivial.so"
    printed = [finish(process) for process in [start(library), start(library)]]
    assert [lines[-1] for lines in printed] == ["loaded", "loaded"]
    assert sum(lines.count("building") for lines in printed) == 1


def test_waiting_process_names_the_lock_and_then_builds_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PATIENCE_S", 0.2)
    library = tmp_path / "trivial.so"
    lines: list[str] = []
    mine = tmp_path / "trivial.build-of-the-holder"
    mine.mkdir()
    with library.with_suffix(".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache.load_or_build(library, write_something, lines.append)
    assert library.is_file()
    assert mine.is_dir()
    assert len(lines) == 2
    assert all(str(library.with_suffix(".lock")) in line for line in lines)


def write_something(folder: Path) -> Path:
    (folder / "built").write_text("something")
    return folder / "built"


def test_failed_build_publishes_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="built again"):
        cache.load_or_build(tmp_path / "trivial.so", refuse, print)
    assert [path.name for path in tmp_path.iterdir()] == ["trivial.lock"]


def test_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A file in the folder's place, since the tests may run as root, whom no permission stops."""
    (tmp_path / "file").write_text("")
    library = tmp_path / "file" / "kernels" / "trivial.so"
    lines = finish(start(library))
    assert lines[1:] == ["building", "loaded"]
    assert str(library.parent) in lines[0]
    assert "TINYVLLM_CACHE" in lines[0]


def test_read_only_cache_folder_serves_what_it_has(library: Path) -> None:
    library.with_suffix(".lock").mkdir()  # opening it for writing fails, as in a read-only folder
    cache.load_or_build(library, refuse, print)


def test_read_only_cache_folder_without_the_library(tmp_path: Path) -> None:
    library = tmp_path / "trivial.so"
    library.with_suffix(".lock").mkdir()
    lines: list[str] = []
    folders: list[Path] = []

    def build_elsewhere(folder: Path) -> Path:
        folders.append(folder)
        return write_something(folder)

    cache.load_or_build(library, build_elsewhere, lines.append)
    assert len(lines) == 1
    assert tmp_path not in folders[0].parents
    assert not folders[0].exists()
    assert [path.name for path in tmp_path.iterdir()] == ["trivial.lock"]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TINYVLLM_CACHE", raising=False)
    assert cache.cache_folder() == tmp_path / ".cache" / "tinyvllm" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache.cache_folder() == tmp_path / ".cache" / "tinyvllm" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_folder() == Path("/xdg/tinyvllm/kernels")
    monkeypatch.setenv("TINYVLLM_CACHE", "/own")
    assert cache.cache_folder() == Path("/own/kernels")


def test_library_name_depends_on_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [build.library_name("sm_90a"), build.library_name("sm_80")]
    assert names[0] == build.library_name("sm_90a")
    for change in (
        lambda patch: patch.setattr(torch, "__version__", "9.9"),
        lambda patch: patch.setattr(torch.version, "cuda", "99.0"),
        lambda patch: patch.setattr(build, "CXX_FLAGS", ("-O1",)),
        lambda patch: patch.setattr(toolchain, "NVCC_FLAGS", ("-O1",)),
        lambda patch: patch.setenv("NVCC_APPEND_FLAGS", "-G"),
        lambda patch: patch.setattr(toolchain, "all_sources", lambda: [tmp_path / "a.cu"]),
    ):
        (tmp_path / "a.cu").write_text("// one")
        with monkeypatch.context() as patch:
            change(patch)
            names.append(build.library_name("sm_90a"))
    monkeypatch.setattr(toolchain, "all_sources", lambda: [tmp_path / "a.cu"])
    (tmp_path / "a.cu").write_text("// two")
    names.append(build.library_name("sm_90a"))
    assert len(set(names)) == len(names) == 9


def test_compiler_error_is_shown_and_logged(tmp_path: Path) -> None:
    (tmp_path / "broken.cpp").write_text("int f() { return no_such_name; }\n")
    with pytest.raises(UserError, match=r"broken.cpp:1:.* error: .no_such_name. was not declared") as caught:
        build.build_library("broken", [tmp_path / "broken.cpp"], [], [], tmp_path, toolchain.find_ninja())
    log = Path(caught.value.where)
    assert "no_such_name" in log.read_text()
    log.unlink()


def test_max_jobs_reaches_ninja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ninja = tmp_path / "ninja"
    ninja.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo 1.12\necho "$@" > {tmp_path}/arguments\nexit 1\n')
    ninja.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MAX_JOBS", "3")
    (tmp_path / "a.cpp").write_text("")
    with pytest.raises(UserError, match="could not be built") as caught:
        build.build_library("a", [tmp_path / "a.cpp"], [], [], tmp_path, toolchain.find_ninja())
    Path(caught.value.where).unlink()
    assert "-j 3" in (tmp_path / "arguments").read_text()
