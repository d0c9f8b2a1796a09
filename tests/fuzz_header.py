"""Does the header reader agree with the reference reader? The comparison, and a coverage-guided fuzzer that makes it.

CI compares on inputs of hypothesis. The fuzzer needs atheris, which is no dependency of this project:

    python -m venv /tmp/fuzz && /tmp/fuzz/bin/pip install atheris safetensors
    /tmp/fuzz/bin/python tests/fuzz_header.py -max_total_time=600 -max_len=512 [CORPUS]
"""

from __future__ import annotations

import io
import json
import re
import struct
import sys
from pathlib import Path

import safetensors

TOLERATED = (
    "occurs twice",
    "unknown keys",
    "__metadata__ is not an object",
    "does not begin with {",
    "description is not an object",
)
"""Faults, by words of their messages, that the reference reader lets pass though the specification forbids them."""

SEEDS = (
    b"{}",
    b'{"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[0],"data_offsets":[8,8]}}',
    b'{"__metadata__":{"format":"pt"},"\\u00e9":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}   ',
    b'{"b":{"shape":[3],"dtype":"F4","data_offsets":[1,3]},"a":{"data_offsets":[0,1],"dtype":"BOOL","shape":[1]}}',
    b'{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]},"c":{"dtype":"C64","shape":[1],"data_offsets":[3,11]}}',
)
WORDS = (
    '"dtype":', '"shape":[', '"data_offsets":[0,', '"__metadata__":', "},", '"a":{', "[0,0]", "18446744073709551615",
    "18446744073709551616", "-0", "1e3", "NaN", "null", "true", '"F8_E8M0"', '"I64"',
    '"F4"', "\\ud800", "\\u0061", "\xff",
)  # fmt: skip


def accepted_by_reference(content: bytes) -> bool:
    """Whether the reference reader takes these bytes for a safetensors file."""
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


def disagreement(content: bytes) -> str | None:
    """Refused must be what the reference refuses; what only we refuse must be a breach that it is known to let pass."""
    from tinyvllm_cli.checkpoint.header import scan_stream

    header, found = scan_stream(Path("x"), io.BytesIO(content), len(content))
    if not accepted_by_reference(content):
        return None if found else f"accepted, but the reference refuses it: {header}"
    wrong = [fault for fault in found if not any(breach in fault.what for breach in TOLERATED)]
    if wrong and any("occurs twice" in fault.what for fault in found):
        return disagreement(without_doubles(content))
    return f"the reference accepts it: {wrong}" if wrong else None


def without_doubles(content: bytes) -> bytes:
    """The file as the reference reader sees it: of keys that occur twice with the last one's value only."""
    (size,) = struct.unpack_from("<Q", content)
    header = json.dumps(json.loads(content[8 : 8 + size])).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


def file_of(data: bytes) -> bytes:
    """A fuzzer's input as a file: its first byte says how the frame is wrong, the rest is the header's JSON.

    Nearly always the frame is right and the data section as long as the header says, so that deep checks are reached.
    """
    kind, text = data[:1], data[1:]
    if kind == b"\xff":
        return text
    ends = [int(end) for end in re.findall(rb'data_offsets"\s*:\s*\[\s*\d{1,9}\s*,\s*(\d{1,9})\s*\]', text)]
    size = min(max(ends, default=0), 4096)
    if kind >= b"\xf0":
        size = max(0, size + kind[0] - 0xF7)
    return struct.pack("<Q", len(text)) + text + bytes(size)


def main() -> None:
    """Runs until libFuzzer's options say stop, or a disagreement is found."""
    import atheris

    with atheris.instrument_imports(include=["tinyvllm_cli", "json"]):
        import tinyvllm_cli.checkpoint.header  # noqa: F401

    def one_input(data: bytes) -> None:
        difference = disagreement(file_of(data))
        if difference:
            raise RuntimeError(f"{file_of(data)!r}: {difference}")

    corpus = Path(next((word for word in sys.argv[1:] if not word.startswith("-")), "corpus"))
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(SEEDS):
        (corpus / f"seed-{number}").write_bytes(b"\0" + seed)
    words = corpus.with_suffix(".dict")
    escaped = ("".join(f"\\x{ord(char):02x}" for char in word) for word in WORDS)
    words.write_text("".join(f'"{word}"\n' for word in escaped))
    options = [word for word in sys.argv[1:] if word.startswith("-")]
    atheris.Setup([sys.argv[0], *options, f"-dict={words}", str(corpus)], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
