"""The safetensors header: what is right is read, what is wrong is named, and the verdict is the reference reader's."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from files import write_raw, write_tensors
from fuzz_header import SEEDS, WORDS, accepted_by_reference, disagreement, file_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyvllm_cli.checkpoint.header import DTYPE_BITS, MAX_HEADER_BYTES, read_header, scan_header, scan_stream
from tinyvllm_cli.errors import UserError


def entry(dtype: str = "F32", shape: Any = (1,), begin: Any = 0, end: Any = 4, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def faults(path: Path) -> str:
    return "\n".join(map(str, scan_header(path)[1]))


# --- right files -----------------------------------------------------------------------------------------------------


def test_a_header_is_read(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry("BF16", (2, 3), 4, 16), "a": entry("F32", (), 0, 4)}
    text = json.dumps(header).encode() + b"   "
    path = write_raw(tmp_path / "x.safetensors", text, bytes(16))
    found = read_header(path)
    assert (found.header_bytes, found.data_start, found.data_bytes) == (len(text), 8 + len(text), 16)
    assert found.metadata == {"format": "pt"}
    b, a = found.tensors
    assert (b.name, b.dtype, b.shape, b.begin, b.end, b.file) == ("b", "BF16", (2, 3), 4, 16, path)
    assert (b.num_elements, b.nbytes) == (6, 12)
    assert (a.shape, a.num_elements, a.nbytes) == ((), 1, 4)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"a": entry(shape=(0,), end=0)},
        {"a": entry(shape=(0, 2**60), end=0)},
        {"a": entry(shape=(0,), end=0), "b": entry(), "c": entry(shape=(3, 0), begin=4)},
        {"a": entry("F4", (2, 4))},
        {"\x1b[31m[red]\n": entry()},
        {"": entry()},
    ],
)
def test_odd_but_right(tmp_path: Path, header: dict[str, Any]) -> None:
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    path = write_raw(tmp_path / "x.safetensors", header, bytes(end))
    assert len(read_header(path).tensors) == len(header)
    assert accepted_by_reference(path.read_bytes())


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_of_the_format(tmp_path: Path, dtype: str) -> None:
    nbytes = DTYPE_BITS[dtype]
    path = write_raw(tmp_path / "x.safetensors", {"a": entry(dtype, (8,), 0, nbytes)}, bytes(nbytes))
    assert read_header(path).tensors[0].nbytes == nbytes
    assert accepted_by_reference(path.read_bytes())


# --- C09: broken files -----------------------------------------------------------------------------------------------

GOOD = json.dumps({"a": entry(), "b": entry("F32", (2,), 4, 12)}).encode()
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 2471645608\n"
HTML = b"<!DOCTYPE html>\n<html><head><title>Log in</title></head><body></body></html>"
C09 = {
    "empty": (b"", "is empty"),
    "7 bytes": (b"\x10\0\0\0\0\0\0", "7 bytes"),
    "LFS pointer": (LFS, "looks like a Git LFS pointer"),
    "HTML": (HTML, "looks like a web page"),
    "HTML with space": (b"\n  " + HTML.lower(), "looks like a web page"),
    "length 2^63": (struct.pack("<Q", 2**63) + GOOD, "9,223,372,036,854,775,808 bytes"),
    "length 1000 in 10 bytes": (struct.pack("<Q", 1000) + b"{}", "1,000 bytes, but only 2 follow"),
    "length beyond the cap": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + GOOD, "at most 100,000,000"),
    "not UTF-8": (struct.pack("<Q", 9) + b'{"\xff\xfe":{}}'[:9], "not UTF-8: byte 0xff"),
    "UTF-16": (struct.pack("<Q", 4) + "{}".encode("utf-16-le"), "not valid JSON"),
    "JSON cut": (struct.pack("<Q", len(GOOD) - 5) + GOOD[:-5], "not valid JSON"),
    "data 1 short": (struct.pack("<Q", len(GOOD)) + GOOD + bytes(11), "expected 12 bytes, there are 11"),
    "data 1 long": (struct.pack("<Q", len(GOOD)) + GOOD + bytes(13), "expected 12 bytes, there are 13"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(40), "looks like a GGUF file"),
    "zip": (b"PK\x03\x04\0\0\0\0" + bytes(40), "looks like a PyTorch or zip archive"),
}


@pytest.mark.parametrize("case", C09)
def test_c09_broken_files(tmp_path: Path, case: str) -> None:
    content, message = C09[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_header(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert not accepted_by_reference(content)


def test_c09_allocates_little(tmp_path: Path) -> None:
    """All of them again in a process that may use 2 GiB of address space, a sparse file of 1 TiB among them."""
    for number, (content, _) in enumerate(C09.values()):
        (tmp_path / f"{number}.safetensors").write_bytes(content)
    os.truncate(write_raw(tmp_path / "sparse.safetensors", GOOD), 2**40)
    script = (
        "import resource, sys, pathlib, tracemalloc; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))\n"
        "from tinyvllm_cli.checkpoint.header import scan_header\n"
        "tracemalloc.start()\n"
        "print(sum(bool(scan_header(p)[1]) for p in pathlib.Path(sys.argv[1]).iterdir()))\n"
        "print(tracemalloc.get_traced_memory()[1])"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    count, peak = map(int, done.stdout.split())
    assert count == len(C09) + 1
    assert peak < 2**20


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "is not a file" in faults(tmp_path / "pipe.safetensors")
    assert "is not a file" in faults(tmp_path)
    assert "No such file" in faults(tmp_path / "missing.safetensors")


# --- faults of tensors -----------------------------------------------------------------------------------------------

TENSOR_FAULTS: dict[str, tuple[Any, str]] = {
    "unknown dtype": ({"a": entry("F31")}, "unknown dtype F31"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, "dtype is missing"),
    "unknown key": ({"a": entry(stride=[1])}, "unknown keys"),
    "no object": ({"a": [1]}, "not an object"),
    "negative": ({"a": entry(shape=(-1,))}, "not a list of sizes"),
    "float": (b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', "not a list of sizes"),
    "minus zero": (b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', "not a list of sizes"),
    "bool": ({"a": entry(shape=(True,))}, "not a list of sizes"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2, 4]}}, "not [begin, end]"),
    "backwards": ({"a": entry(begin=4, end=0)}, "end before they begin"),
    "size": ({"a": entry(shape=(2,))}, "takes 8 bytes, but data_offsets span 4"),
    "overflow": ({"a": entry(shape=(2**62, 2**62, 0), end=0)}, "overflows 64 bits"),
    "half a byte": ({"a": entry("F4", (1,), 0, 0)}, "no whole bytes"),
    "twice": (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
              b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "a occurs twice"),
    "key twice": (b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "a key occurs twice"),
    "surrogate": (b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "not valid Unicode"),
    "metadata": ({"__metadata__": {"x": 1}, "a": entry()}, "value of x is not a string"),
    "metadata null": ({"__metadata__": None, "a": entry()}, "__metadata__ is not an object"),
    "NaN": (b'{"a":NaN}', "NaN"),
    "leading space": (b' {"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "does not begin with {"),
    "list": (b"[]", "does not begin with {"),
    "deep": (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested too deeply"),
    "long number": (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON"),
    "overlap": ({"a": entry(), "b": entry("U8", (2,), 2, 4)}, "overlap: b at [2, 4) begins inside a"),
    "hole": ({"a": entry("U8", (1,), 0, 1), "b": entry("U8", (1,), 3, 4)}, "the 2 bytes at [1, 3) behind a"),
    "hole in front": ({"a": entry("U8", (1,), 3, 4)}, "the 3 bytes at [0, 3)"),
}  # fmt: skip
LAXER_REFERENCE = {"unknown key", "twice", "metadata null", "leading space"}
"""Breaches of the specification that the reference reader lets pass."""


@pytest.mark.parametrize("case", TENSOR_FAULTS)
def test_faults_of_tensors(tmp_path: Path, case: str) -> None:
    header, message = TENSOR_FAULTS[case]
    path = write_raw(tmp_path / "x.safetensors", header, bytes(4))
    assert message in faults(path)
    assert accepted_by_reference(path.read_bytes()) == (case in LAXER_REFERENCE)


def test_all_faults_are_listed(tmp_path: Path) -> None:
    header = {"a": entry("X"), "b": entry(shape=(-1,)), "good": entry(), "[c]\x1b": entry(shape=(7,))}
    with pytest.raises(UserError) as caught:
        read_header(write_raw(tmp_path / "x.safetensors", header, bytes(4)))
    message = str(caught.value)
    assert "3 faults" in message
    assert all(part in message for part in ("tensor a: ", "tensor b: ", "tensor '[c]\\x1b': "))
    assert "\x1b" not in message


# --- against the reference reader ------------------------------------------------------------------------------------


counts = st.one_of(st.integers(-1, 9), st.integers(0, 2**65), st.sampled_from([1.0, True, None, "4", [], 2**64 - 1]))
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "F6_E2M3", "bogus", 3]),
        "shape": st.one_of(st.lists(counts, max_size=3), counts),
        "data_offsets": st.one_of(st.lists(counts, min_size=1, max_size=3), counts),
    }
)
near_entries = st.builds(
    lambda dtype, shape, begin: entry(dtype, shape, begin, begin + DTYPE_BITS[dtype] * shape[0] * shape[1] // 8),
    st.sampled_from(["F32", "BF16", "U8"]),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.integers(0, 24),
)
names = st.one_of(st.sampled_from(["a", "b", "__metadata__"]), st.text(max_size=4))
headers = st.dictionaries(names, st.one_of(near_entries, entries, st.dictionaries(st.text(), st.text())), max_size=4)


def check_verdict(path: Path, content: bytes) -> None:
    """The verdict is the reference reader's, and the same on a file as on the bytes."""
    assert not disagreement(content), content
    path.write_bytes(content)
    assert bool(scan_header(path)[1]) == bool(scan_stream(path, io.BytesIO(content), len(content))[1])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=headers, size=st.integers(0, 40), flip=st.none() | st.tuples(st.integers(0, 400), st.integers(0, 255)))
def test_fuzzed_headers(tmp_path: Path, header: dict[str, Any], size: int, flip: tuple[int, int] | None) -> None:
    text = bytearray(json.dumps(header).encode())
    if flip and flip[0] < len(text):
        text[flip[0]] = flip[1]
    check_verdict(tmp_path / "x", struct.pack("<Q", len(text)) + bytes(text) + bytes(size))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_tilings_and_their_mutations(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Right files in any order of tensors are read; moving one offset by a byte or two is noticed."""
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    spans, cursor = {}, 0
    for number, size in enumerate(sizes):
        spans[f"t{number}"] = entry("U8", (size,), cursor, cursor + size)
        cursor += size
    header = {name: spans[name] for name in data.draw(st.permutations(list(spans)))}
    path = tmp_path_factory.getbasetemp() / "tiling.safetensors"
    check_verdict(write_raw(path, header, bytes(cursor)), path.read_bytes())
    assert not scan_header(path)[1]
    victim = data.draw(st.sampled_from(list(header)))
    change = data.draw(st.sampled_from([-2, -1, 1, 2]))
    begin, end = header[victim]["data_offsets"]
    header[victim] = entry("U8", header[victim]["shape"], begin + change, end + change)
    path = write_raw(path, header, bytes(cursor))
    check_verdict(path, path.read_bytes())
    assert scan_header(path)[1] or begin == end


def test_faults_behind_a_doubled_name_are_ours_alone() -> None:
    """The reference reader sees the last description of a name only: ours refuses both files, it the second."""
    first, second = '"dtype":"U8","shape":[1,2],"data_offsets":[0,8]', '"dtype":"U8","shape":[8],"data_offsets":[0,8]'
    for order, accepted in (
        (f'{{"a":{{{first}}},"a":{{{second}}}}}', True),
        (f'{{"a":{{{second}}},"a":{{{first}}}}}', False),
    ):
        content = file_of(b"\0" + order.encode())
        assert accepted_by_reference(content) is accepted
        assert scan_stream(Path("x"), io.BytesIO(content), len(content))[1]
        assert not disagreement(content)


PIECES = [*WORDS, *'{}[]:,"', "0", "4", "8", '"F32"', '"a"', " "]


def test_headers_out_of_pieces_for_some_seconds() -> None:
    """Seeds of the fuzzer, with pieces of JSON put in, taken out and repeated, for a fixed time."""
    rng, end, count = random.Random(), time.monotonic() + 5, 0
    while time.monotonic() < end:
        text = rng.choice(SEEDS)
        for _ in range(rng.randint(1, 4)):
            at, size = rng.randint(0, len(text)), rng.choice((0, 0, 1, 2, 5, 30))
            again = text[at : at + rng.choice((0, 0, 1, 8, 60))]
            text = text[:at] + rng.choice(PIECES).encode("latin-1") * rng.randint(0, 1) + again + text[at + size :]
        content = file_of(bytes([rng.choice((0, 0, 0, 0xF6, 0xF8, 0xFF))]) + text)
        assert not disagreement(content), content
        count += 1
    assert count > 1000


def test_bytes_of_any_kind(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "x.safetensors", {})
    good = path.read_bytes()
    for cut in range(len(good)):
        check_verdict(path, good[:cut])
