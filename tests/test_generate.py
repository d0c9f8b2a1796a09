"""`tinyvllm generate` from the command line to the records, on synthetic models: cases C03, C04, C06, C07 and C10."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import program
import pytest
from answers import check_alike
from models import BOS, CHAT_TEMPLATE, EOS, EOT, byte_chain, chain, edit_json, write_chain, write_rand
from program import Outcome, generate, write_jsonl

HELLO = "é世👋B"


pytestmark = pytest.mark.usefixtures("on_each_device")


@pytest.fixture(scope="module")
def hello(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says HELLO after "A", then stops."""
    return write_chain(tmp_path_factory.mktemp("hello"), byte_chain(HELLO))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A→B→A→B..."""
    return write_chain(tmp_path_factory.mktemp("endless"), chain("A", "B", "A"))


@pytest.fixture(scope="module")
def rand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand(tmp_path_factory.mktemp("rand"))


# Input and output


def test_record(hello: Path) -> None:
    outcome = generate("--model", hello, "--json", "A")
    assert outcome.code == 0
    (record,) = outcome.records
    timing, identity = record.pop("timing"), record.pop("model_id")
    assert len(identity) == 16
    assert 0 < timing["first_token_s"] <= timing["total_s"]
    assert record == {
        "index": 0,
        "prompt": "A",
        "model": hello.name,
        "prompt_token_ids": [BOS, ord("A")],
        "text": HELLO,
        "token_ids": [*HELLO.encode(), EOS],
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 11,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    first, *_, last = outcome.err.splitlines()
    assert first == f"model: {hello}"
    assert last.startswith("1 answer · 2 tokens in, 11 out · ")
    assert last.endswith("cpu float32" if program.DEVICE == "cpu" else "cuda:0 bfloat16")


@pytest.mark.parametrize("way", ["arguments", "file", "stdin", "dash", "jsonl", "jsonl stdin"])
def test_ways_to_give_prompts(tmp_path: Path, hello: Path, way: str) -> None:
    text = "A\n\xe9\n".encode()
    lines = b'{"prompt": "A"}\n{"prompt": "\\u00e9"}'
    (tmp_path / "p.txt").write_bytes(text)
    (tmp_path / "p.jsonl").write_bytes(lines)
    arguments, stdin = {
        "arguments": (["A", "é"], b""),
        "file": (["--prompts", tmp_path / "p.txt"], b""),
        "stdin": (["--prompts", "-"], text),
        "dash": (["-"], text),
        "jsonl": (["--prompts", tmp_path / "p.jsonl"], b""),
        "jsonl stdin": (["--prompts", "-", "--format", "jsonl"], lines),
    }[way]
    outcome = generate("--model", hello, "--json", "--max-tokens", 2, *arguments, stdin=stdin)
    assert [(record["index"], record["prompt"]) for record in outcome.records] == [(0, "A"), (1, "é")]
    assert [record["text"] for record in outcome.records] == ["é", "世"[:0] + "\ufffd"]


def test_text_for_people(hello: Path) -> None:
    assert generate("--model", hello, "A").out == HELLO + "\n"
    assert generate("--model", hello, "A", "B").out == f"> A\n{HELLO}\n\n> B\n\n"
    quiet = generate("--model", hello, "A", "--quiet")
    assert (quiet.out, quiet.err) == (HELLO + "\n", "")


def test_a_prompt_that_is_a_file_is_remarked(hello: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("A\n")
    assert "to read the file of this name: --prompts p.txt" in generate("--model", hello, "p.txt").err


def test_lines_with_their_own_parameters(tmp_path: Path, endless: Path) -> None:
    lines = [
        {"prompt": "A", "id": "x"},
        {"prompt": "A", "max_tokens": 3, "note": 1},
        {"prompt_token_ids": [ord("B")], "stop_token_ids": [ord("B")], "note": 2},
        {"prompt": "A", "max_tokens": 0},
        {"prompt_token_ids": [9999]},
        {"prompt_token_ids": []},
        {"messages": [{"role": "user", "content": "A"}]},
        "A",
    ]
    outcome = generate("--model", endless, "--json", "-n", 5, "--prompts", write_jsonl(tmp_path / "p.jsonl", lines))
    assert outcome.code == 3
    records = outcome.records
    assert [record["index"] for record in records] == list(range(8))
    assert [record.get("text") for record in records[:3]] == ["BABAB", "BAB", "A"]
    assert [record["finish_reason"] for record in records[:3]] == ["length", "length", "stop"]
    assert records[0]["id"] == "x"
    expected = ["max_tokens", "9999", "no token", "no chat template", "not a JSON object"]
    for record, message in zip(records[3:], expected, strict=True):
        assert message in record["error"]
        assert "text" not in record
    assert outcome.err.count("'note'") == 1
    assert "3 answers · 5 errors" in outcome.err


def test_a_broken_model_leaves_stdout_empty(tmp_path: Path, hello: Path) -> None:
    outcome = generate("--model", tmp_path, "A")
    assert (outcome.code, outcome.out) == (1, "")
    assert str(tmp_path) in outcome.err


# C03


@pytest.mark.parametrize(
    ("generation_eos", "tokenizer_eos", "arguments", "text", "count", "reason"),
    [
        ([EOT, EOS], "<eos>", [], "B", 2, "stop"),
        (None, "<eos>", [], "BC", 4, "stop"),
        (None, "<eot>", [], "B", 2, "stop"),
        ([EOT, EOS], "<eos>", ["--ignore-eos"], "BCDEABCDEABCDE"[:14], 20, "length"),
    ],
    ids=["generation_config", "config", "tokenizer_config", "ignored"],
)
def test_c03_end_of_sequence_tokens(
    tmp_path: Path,
    generation_eos: list[int] | None,
    tokenizer_eos: str,
    arguments: list[str],
    text: str,
    count: int,
    reason: str,
) -> None:
    steps = chain("A", "B", "<eot>", "C", "<eos>", "D", "E", "A")
    write_chain(tmp_path, steps, eos=EOS, generation_eos=generation_eos, tokenizer_eos=tokenizer_eos)
    outcome = generate("--model", tmp_path, "--json", "--max-tokens", 20, "A", *arguments)
    (record,) = outcome.records
    assert (record["text"], len(record["token_ids"]), record["finish_reason"]) == (text, count, reason)
    for shown in (
        generate("--model", tmp_path, "-n", 20, "A", option, *arguments).out for option in ("--stream", "-q")
    ):
        assert shown == text + "\n"


# C04


@pytest.mark.parametrize(
    ("add_bos", "arguments", "expected"),
    [
        (True, ["A"], b"[user]A\0[assistant]"),
        (True, ["--raw", "A"], b"A"),
        (True, ["--raw", "<bos>A"], b"A"),
        (False, ["A"], b"[user]A\0[assistant]"),
        (False, ["--raw", "A"], None),
    ],
    ids=["a chat", "b raw", "c raw with its own", "d chat", "d raw"],
)
def test_c04_one_bos(tmp_path: Path, add_bos: bool, arguments: list[str], expected: bytes | None) -> None:
    write_chain(tmp_path, chain("A", "B", "A"), add_bos=add_bos, chat_template=CHAT_TEMPLATE)
    (record,) = generate("--model", tmp_path, "--json", "-n", 1, *arguments).records
    ids = [ord("A")] if expected is None else [BOS, *(EOT if byte == 0 else byte for byte in expected)]
    assert record["prompt_token_ids"] == ids


def test_messages(tmp_path: Path) -> None:
    model = write_chain(tmp_path, chain("A", "B", "A"), chat_template=CHAT_TEMPLATE)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    file = write_jsonl(tmp_path / "p.jsonl", [{"messages": messages}])
    (record,) = generate("--model", model, "--json", "-n", 1, "--prompts", file).records
    expected = [EOT if byte == 0 else byte for byte in b"[system]S\0[user]U\0[assistant]"]
    assert record["prompt_token_ids"] == [BOS, *expected]
    assert (record["prompt"], record["messages"]) == (None, messages)
    raw = generate("--model", model, "--json", "--raw", "--prompts", file)
    assert raw.code == 3
    assert "--raw" in raw.records[0]["error"]


def test_a_template_that_refuses(tmp_path: Path) -> None:
    model = write_chain(tmp_path, chain("A", "B", "A"), chat_template="{{ raise_exception('no, never') }}")
    outcome = generate("--model", model, "A")
    assert (outcome.code, outcome.out) == (3, "")
    assert "no, never" in outcome.err


# C06


def test_c06_prompt_length_limits(tmp_path: Path, endless: Path) -> None:
    lengths = [3, 63, 64, 65, 5]
    lines = [{"prompt": "A" * (length - 1), "id": length} for length in lengths]
    file = write_jsonl(tmp_path / "p.jsonl", lines)
    outcome = generate("--model", endless, "--json", "--max-model-len", 64, "-n", 8, "--prompts", file)
    assert outcome.code == 3
    records = outcome.records
    assert [record["id"] for record in records] == lengths
    assert [len(record.get("token_ids", [])) for record in records] == [8, 1, 0, 0, 8]
    assert [record.get("finish_reason") for record in records] == ["length", "length", None, None, "length"]
    for record in records[2:4]:
        assert "64" in record["error"]
    assert [len(record["prompt_token_ids"]) for record in (*records[:2], records[4])] == [3, 63, 5]


# C07

SMALL_CACHE = ("--block-size", 4, "--kv-blocks", 6)
EIGHT = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


def ids_of(outcome: Outcome) -> list[list[int]]:
    return [record["token_ids"] for record in outcome.records]


def test_c07_a_prompts_that_do_not_fit_together(rand: Path) -> None:
    common = ("--model", rand, "--json", "-n", 12, "--ignore-eos", *EIGHT)
    small = generate(*common, *SMALL_CACHE)
    assert small.code == 0
    assert all(len(ids) == 12 for ids in ids_of(small))
    for options in ((), ("--max-num-seqs", 3)):
        check_alike(ids_of(small), ids_of(generate(*common, *options)), program.DEVICE)


def test_c07_b_a_prompt_that_can_never_fit(rand: Path) -> None:
    common = ("--model", rand, "--json", "-n", 30, "--ignore-eos", *SMALL_CACHE)
    alone = generate(*common, "ten block")
    assert alone.code == 3
    assert "10" in alone.records[0]["error"]
    assert "6" in alone.records[0]["error"]
    short = generate(*common, "-n", 8, "one", "two", "a prompt with more than six blocks", "three")
    assert short.code == 3
    assert [len(record.get("token_ids", [])) for record in short.records] == [8, 8, 0, 8]
    assert "blocks" in short.records[2]["error"]


@pytest.mark.parametrize("option", [("--kv-blocks", 0), ("--kv-cache-memory", "1KiB")])
def test_c07_c_no_cache_at_all(rand: Path, option: tuple[object, ...]) -> None:
    outcome = generate("--model", rand, "--json", "one", *option)
    assert (outcome.code, outcome.out) == (1, "")
    assert "MiB" in outcome.err
    assert "--kv-cache-memory" in outcome.err


# C10


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 7, 10, 20])
def test_c10_streamed_characters(hello: Path, max_tokens: int) -> None:
    common = ("--model", hello, "-n", max_tokens, "A")
    streamed, waited = generate(*common, "--stream"), generate(*common)
    (record,) = generate(*common, "--json").records
    assert streamed.out == waited.out == record["text"] + "\n"
    data = HELLO.encode()[:max_tokens]
    assert record["text"] == data.decode(errors="replace")
    assert record["text"].rstrip("\ufffd") == data.decode(errors="ignore")
    assert record["text"].count("\ufffd") <= 1


# Sampling


def test_draws_depend_on_the_seed_only(tmp_path: Path) -> None:
    """DICE: the exact odds come out, and a line's text does not depend on what runs beside it."""
    odds = {ord("C"): 0.1, ord("D"): 0.2, ord("E"): 0.3, ord("F"): 0.4}
    model = write_chain(tmp_path, {}, dice={ord("A"): odds})
    lines = [{"prompt": "A", "seed": seed} for seed in range(1000)]
    common = ("--model", model, "--json", "--temperature", 1, "--quiet")
    together = [
        record["text"] for record in generate(*common, "--prompts", write_jsonl(tmp_path / "p.jsonl", lines)).records
    ]
    counts = Counter(together)
    assert set(counts) == set("CDEF")
    chi_square = sum((counts[chr(token)] - 1000 * share) ** 2 / (1000 * share) for token, share in odds.items())
    assert chi_square < 11.3  # 99% of honest dice; the seeds are fixed, so this never flickers
    some = write_jsonl(tmp_path / "q.jsonl", lines[40:44][::-1])
    few = generate(*common, "--prompts", some, "--max-num-seqs", 1)
    assert [record["text"] for record in few.records][::-1] == together[40:44]
    assert generate(*common, "--seed", 40, "A").records[0]["text"] == together[40]


def test_vocabulary_larger_than_the_model_is_an_error_record(tmp_path: Path) -> None:
    model = write_chain(tmp_path, chain("A", "B", "A"))
    content = json.loads((model / "tokenizer.json").read_text())
    token = {"id": 260, "content": "<new>", "special": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    edit_json(model / "tokenizer.json", added_tokens=[*content["added_tokens"], token | flags])
    outcome = generate("--model", model, "--json", "A<new>")
    assert outcome.code == 3
    assert "260" in outcome.records[0]["error"]


def test_table(hello: Path) -> None:
    outcome = generate("--model", hello, "--table", "A", "[bold]")
    assert outcome.code == 0
    header, _, *rows = outcome.out.splitlines()
    assert header.split() == ["prompt", "answer"]
    assert [row.split() for row in rows] == [["A", HELLO], ["[bold]"]]
    assert generate("--model", hello, "--table", "--json", "A").code == 2
