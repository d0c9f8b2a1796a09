"""C03 to C07 and C10 once more, through real pipes and through files: every way must bring the same records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from models import BOS, CHAT_TEMPLATE, EOS, EOT, byte_chain, chain, oracle, write_chain, write_rand
from program import tinyvllm

ROOT = Path(__file__).parent.parent
HELLO = "é世👋B"
PROGRAM = (sys.executable, "-m", "tinyvllm_cli")
PIPED = ("--json", "--format", "jsonl", "-")
Records = list[dict[str, Any]]


def plain(text: str) -> Records:
    return [{k: v for k, v in json.loads(line).items() if k != "timing"} for line in text.splitlines()]


def answer(
    device: str, tmp_path: Path, lines: list[Any], *options: object, code: int = 0, pipe: bool = True
) -> Records:
    """The records of a job: through a file and --output in both orders, and perhaps through two pipes; all the same."""
    source = tmp_path / "prompts.jsonl"
    source.write_text("\ufeff" + "".join(json.dumps(line) + "\r\n" for line in lines), encoding="utf-8")
    common = ["generate", "--device", device, *map(str, options)]
    results = []
    for order in ("input", "finished"):
        output = tmp_path / f"{order}.jsonl"
        done = tinyvllm(*common, "--prompts", source, "-o", output, "--order", order, "--overwrite")
        assert (done.code, done.out) == (code, "")
        results.append(sorted(plain(output.read_text()), key=lambda record: int(record["index"])))
    assert results[0] == results[1]
    if not pipe:
        return results[0]
    piped = subprocess.run(
        ["bash", "-c", 'cat "$0" | "$@" | cat; exit ${PIPESTATUS[1]}', str(source), *PROGRAM, *common, *PIPED],
        capture_output=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert piped.returncode == code
    assert plain(piped.stdout.decode("utf-8")) == results[0]
    return results[0]


def test_c03_end_of_sequence(device: str, tmp_path: Path) -> None:
    steps = chain("A", "B", "<eot>", "C", "<eos>", "D", "E", "A")
    model = write_chain(tmp_path / "m", steps, eos=EOS, generation_eos=[EOT, EOS])
    lines = [{"prompt": "A"}, {"prompt": "A", "ignore_eos": True}, {"prompt": "A", "stop_token_ids": [ord("B")]}]
    found = answer(device, tmp_path, lines, "--model", model, "-n", 20)
    assert [(r["text"], r["finish_reason"]) for r in found] == [
        ("B", "stop"),
        ("BCDEABCDEABCDE", "length"),
        ("", "stop"),
    ]


def test_c04_one_bos(device: str, tmp_path: Path) -> None:
    model = write_chain(tmp_path / "m", chain("A", "B", "A"), chat_template=CHAT_TEMPLATE)
    lines = [{"prompt": "A"}, {"prompt": "<bos>A"}, {"messages": [{"role": "user", "content": "A"}]}]
    for options in ((), ("--raw",)):
        code = 3 if options else 0  # messages need the template
        common = ("--model", model, "-n", 1, *options)
        for record in answer(device, tmp_path, lines, *common, code=code, pipe=not options):
            if "error" not in record and (options or record["prompt"] != "<bos>A"):
                assert record["prompt_token_ids"].count(BOS) == 1
                assert record["prompt_token_ids"][0] == BOS


def rand(tmp_path: Path) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A model, 16 prompts of 1 to 60 ids, and the oracle's 20 tokens for each; with a seed whose gaps are wide."""
    prompts = [[(7 * i + 13 * k) % 250 for k in range(1 + 4 * i - i // 8)] for i in range(16)]
    for seed in range(20):
        folder = write_rand(tmp_path / f"rand{seed}", seed=seed)
        expected, gap = oracle(folder, prompts, 20)
        if gap > 0.005:
            return folder, prompts, expected
    raise AssertionError("no seed with wide gaps")


def test_c05_c07_batches_and_small_caches(device: str, tmp_path: Path) -> None:
    folder, prompts, expected = rand(tmp_path)
    lines = [{"prompt_token_ids": ids, "max_tokens": 20, "ignore_eos": True} for ids in prompts]
    for options in ((), ("--max-num-seqs", 5, "--block-size", 8, "--kv-blocks", 12)):
        found = answer(device, tmp_path, lines, "--model", folder, *options, pipe=not options)
        assert [record["prompt_token_ids"] for record in found] == prompts
        if device == "cpu":
            assert [record["token_ids"] for record in found] == expected
    small = [*lines[:2], {"prompt_token_ids": [1] * 60, "max_tokens": 60}, lines[3]]
    few = ("--block-size", 8, "--kv-blocks", 12)
    found = answer(device, tmp_path, small, "--model", folder, *few, code=3, pipe=False)
    assert ["error" in record for record in found] == [False, False, True, False]
    assert "15 KV-cache blocks" in found[2]["error"]
    assert "12 are available" in found[2]["error"]


def test_c06_lengths(device: str, tmp_path: Path) -> None:
    model = write_chain(tmp_path / "m", chain("A", "B", "A"))
    lines = [{"prompt": "A" * (length - 1), "id": length} for length in (3, 63, 64, 65, 5)]
    found = answer(device, tmp_path, lines, "--model", model, "--max-model-len", 64, "-n", 8, code=3)
    assert [(r["id"], len(r.get("token_ids", ()))) for r in found] == [(3, 8), (63, 1), (64, 0), (65, 0), (5, 8)]


def test_c10_characters(device: str, tmp_path: Path) -> None:
    model = write_chain(tmp_path / "m", byte_chain(HELLO))
    lines = [{"prompt": "A", "max_tokens": count} for count in (1, 4, 7, 20)]
    found = answer(device, tmp_path, lines, "--model", model)
    for record, line in zip(found, lines, strict=True):
        assert record["text"] == HELLO.encode()[: line["max_tokens"]].decode(errors="replace")
    command = [
        sys.executable,
        "-m",
        "tinyvllm_cli",
        "generate",
        "--device",
        device,
        "--model",
        str(model),
        "-q",
        "--stream",
    ]
    done = subprocess.run([*command, "A"], capture_output=True, timeout=60, cwd=ROOT)
    assert done.stdout.decode() == HELLO + "\n"
