"""The file of records: order, resuming, refusals; OpenAI's batch format; whole files."""

from __future__ import annotations

import fcntl
import json
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import CHAT_TEMPLATE, byte_chain, chain, edit_json, write_chain
from program import Outcome, tinyvllm, write_jsonl

from tinyvllm_cli.errors import UserError
from tinyvllm_cli.jobs.output import OutputFile
from tinyvllm_cli.jobs.results import InOrder

HELLO = "é世👋B"
JOB = {"model": "m", "sampling": {"n": 1, "stop": ()}}


@pytest.fixture(scope="module")
def hello(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hello")
    return write_chain(folder, byte_chain(HELLO) | chain("]", HELLO.encode()[0]), chat_template=CHAT_TEMPLATE)


def generate(*arguments: object, stdin: bytes = b"") -> Outcome:
    return tinyvllm("generate", "--device", "cpu", *arguments, stdin=stdin)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_input(path: Path, count: int) -> Path:
    """Answers of different lengths, so that they finish in another order; every seventh cannot be answered."""
    lines = [{"prompt": "A", "max_tokens": 1 + (i * 5) % 9 if i % 7 else 0, "id": f"p{i}"} for i in range(count)]
    return write_jsonl(path, lines)


def without_time(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key != "timing"} for item in items]


# Through the program


@pytest.mark.parametrize("order", ["input", "finished"])
def test_a_file_of_records(hello: Path, tmp_path: Path, order: str) -> None:
    source, output = write_input(tmp_path / "p.jsonl", 30), tmp_path / "o.jsonl"
    common = ("--model", hello, "--raw", "--prompts", source, "--max-num-seqs", 4)
    outcome = generate(*common, "--output", output, "--order", order)
    assert (outcome.code, outcome.out) == (3, "")
    assert "25 answers · 5 errors · 50 tokens in" in outcome.err
    written = records(output)
    assert sorted(record["index"] for record in written) == list(range(30))
    assert ([record["index"] for record in written] == list(range(30))) == (order == "input")
    shown = generate(*common, "--json").records
    assert without_time(sorted(written, key=lambda record: record["index"])) == without_time(shown)
    assert json.loads((tmp_path / "o.jsonl.job").read_text())["sampling"]["temperature"] == 0


def test_order_on_stdout(hello: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "p.jsonl", 12)
    outcome = generate("--model", hello, "--json", "--order", "finished", "--prompts", source, "--quiet")
    indices = [record["index"] for record in outcome.records]
    assert sorted(indices) == list(range(12)) != indices


@pytest.mark.parametrize("order", ["input", "finished"])
@pytest.mark.parametrize("cut", ["nothing", "empty", "a line", "half a line", "the line's end", "middle"])
def test_resuming(hello: Path, tmp_path: Path, order: str, cut: str) -> None:
    """However much of the file is there, in the end it is what it would have been."""
    source, output = write_input(tmp_path / "p.jsonl", 20), tmp_path / "o.jsonl"
    common = ("--model", hello, "--raw", "--prompts", source, "--output", output, "--order", order)
    generate(*common, "--max-num-seqs", 4)
    whole, lines = records(output), output.read_bytes().splitlines(keepends=True)
    kept = {
        "nothing": b"".join(lines),
        "empty": b"",
        "a line": b"".join(lines[:-1]),
        "half a line": b"".join(lines[:8]) + lines[8][:30],
        "the line's end": b"".join(lines[:8])[:-1],
        "middle": b"".join(lines[:5] + lines[9:12]),
    }[cut]
    output.write_bytes(kept)
    outcome = generate(*common, "--resume", "--max-num-seqs", 2)
    assert outcome.code == 3
    again = records(output)
    assert ("loaded in" in outcome.err) == (cut != "nothing")
    if order == "input":
        assert without_time(again) == without_time(whole)
    key = lambda record: record["index"]  # noqa: E731
    assert without_time(sorted(again, key=key)) == without_time(sorted(whole, key=key))
    if order == "finished" and cut == "middle":
        assert output.read_bytes().startswith(kept)
        assert "8 of them from before" in outcome.err


def test_what_may_not_be_resumed(hello: Path, tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "p.jsonl", 3), tmp_path / "o.jsonl"
    common = ["--model", hello, "--raw", "--prompts", source, "--output", output]
    assert generate(*common).code == 3
    before = output.read_bytes()

    def refused(*arguments: object, code: int = 1) -> str:
        outcome = generate(*arguments)
        assert (outcome.code, outcome.out, output.read_bytes()) == (code, "", before)
        return outcome.err

    assert "there is such a file already" in refused(*common, code=2)
    assert "temperature was 0.0 and is 0.5; top_k was 0 and is 9" in refused(
        *common, "--resume", "--temperature", 0.5, "--top-k", 9
    )
    assert "max_model_len was null and is 40" in refused(*common, "--resume", "--max-model-len", 40)
    assert 'order was "input" and is "finished"' in refused(*common, "--resume", "--order", "finished")
    assert "raw was true and is false" in refused(*(word for word in common if word != "--raw"), "--resume")
    assert "is the input itself" in refused("--model", hello, "--prompts", output, "--output", output, code=2)
    assert "is the input itself" in refused(
        "--model", hello, "--prompts", f"{output}.job", "--output", output, "--overwrite", code=2
    )
    assert "read only once" in refused("--model", hello, "--output", output, "--resume", "-", code=2)
    other = write_chain(tmp_path / "other", byte_chain("xyz"))
    assert "model was" in refused("--model", other, *common[2:], "--resume")
    source.write_text(source.read_text().replace("p2", "p3"))
    assert "sha256 of the input was" in refused(*common, "--resume")
    write_input(source, 3)
    assert generate(*common, "--resume").code == 3
    (tmp_path / "o.jsonl.job").unlink()
    assert "o.jsonl.job, which says what job it is of, is missing" in refused(*common, "--resume")
    assert generate(*common, "--overwrite").code == 3
    assert without_time(records(output)) == without_time([json.loads(line) for line in before.splitlines()])


def test_what_does_not_change_the_records_may_change(hello: Path, tmp_path: Path) -> None:
    source, output = write_input(tmp_path / "p.jsonl", 3), tmp_path / "o.jsonl"
    common = ["--prompts", source, "--output", output]
    generate("--model", hello, *common)
    output.write_bytes(output.read_bytes().splitlines(keepends=True)[0])
    moved = tmp_path / "renamed"
    moved.mkdir()
    for path in hello.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    source.rename(tmp_path / "q.jsonl")
    common[1] = tmp_path / "q.jsonl"
    assert generate("--model", moved, *common, "--resume", "--max-num-seqs", 2, "--kv-blocks", 64).code == 3
    assert [record["index"] for record in records(output)] == [0, 1, 2]
    edit_json(moved / "generation_config.json", eos_token_id=[5])
    assert "model was" in generate("--model", moved, *common, "--resume").err


def test_a_job_from_stdin_can_be_written_but_not_resumed(hello: Path, tmp_path: Path) -> None:
    output = tmp_path / "o.jsonl"
    assert generate("--model", hello, "--output", output, "-", stdin=b"A\nB\n").code == 0
    assert [record["prompt"] for record in records(output)] == ["A", "B"]


def test_output_that_cannot_be_written(hello: Path, tmp_path: Path) -> None:
    outcome = generate("--model", hello, "A", "--output", "/dev/full")
    assert outcome.code == 1
    assert "No space left on device" in outcome.err
    assert generate("--model", hello, "A", "--output", "/dev/null").code == 0
    with (tmp_path / "o.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        outcome = generate("--model", hello, "A", "--output", file.name)
    assert (outcome.code, "another process is writing it" in outcome.err) == (1, True)


def test_whole_files(hello: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbfx\r\n\n y\n\n")
    for arguments, stdin in ((("--prompts", path), b""), (("-",), path.read_bytes())):
        (record,) = generate("--model", hello, "--json", "--whole-file", *arguments, stdin=stdin).records
        assert record["prompt"] == "x\r\n\n y\n"
    path.write_bytes(b"\n")
    assert "holds no prompt" in generate("--model", hello, "--whole-file", "--prompts", path).err
    path.write_bytes(b"a\xff")
    assert "not UTF-8" in generate("--model", hello, "--whole-file", "--prompts", path).err


# The file alone


def begin(path: Path, total: int = 9, in_order: bool = True, resume: bool = True, job: Any = JOB) -> tuple[Any, Any]:
    output = OutputFile(path, resume=resume, overwrite=False)
    return output, output.begin(job, total, in_order)


@given(order=st.permutations(range(9)), written=st.integers(0, 9), torn=st.integers(0, 12), in_order=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_part_of_the_records_may_be_there(
    tmp_path: Path, order: list[int], written: int, torn: int, in_order: bool
) -> None:
    path = tmp_path / "o.jsonl"
    for file in tmp_path.iterdir():
        file.unlink()
    output, done = begin(path, in_order=in_order)
    assert (done.num_records, done.first, done.early) == (0, 0, {})
    for index in order[:written]:
        output.write({"index": index, "text": "é"})
    output.close()
    with path.open("ab") as file:
        file.write(b'{"index": 0,'[:torn])
    output, done = begin(path, in_order=in_order)
    assert [done.has(index) for index in range(10)] == [index in order[:written] for index in range(9)] + [False]
    assert done.num_records == written
    ordered = InOrder(lambda record: output.write(record), done.first)
    for index, record in done.early.items():
        ordered.add(index, record)
    for index in order:
        if not done.has(index):
            record = {"index": index, "text": "é"}
            ordered.add(index, record) if in_order else output.write(record)
    output.close()
    indices = [record["index"] for record in records(path)]
    assert sorted(indices) == list(range(9))
    assert not in_order or indices == sorted(indices)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"index": 0}\n{"index": 0}\n', "line 2 is a second record of prompt 0"),
        ('{"index": 0}\nx\n{"index": 1}\n', "line 2 is no record"),
        ('{"index": 9}\n', "line 1 is of 9 prompts the record of number 9"),
        ('{"index": -1}\n', "line 1 is no record"),
        ('{"id": "batch_req_x", "custom_id": 1}\n', "line 1 is no record"),
        ("[0]\n", "line 1 is no record"),
    ],
)
def test_a_file_that_is_not_ours(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "o.jsonl"
    begin(path)[0].close()
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        begin(path)
    assert path.read_text() == content


def test_a_record_that_finds_no_room_leaves_no_half_of_it(tmp_path: Path) -> None:
    """What waits for it is written by `close`, where there may be room again."""
    path = tmp_path / "o.jsonl"
    output, _ = begin(path)
    output.write({"index": 0})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limit[1]))
    try:
        with pytest.raises(UserError, match=r"o\.jsonl: cannot be written: File too large"):
            output.write({"index": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    output.write({"index": 2})
    output.close()
    assert [record["index"] for record in records(path)] == [0, 2]


def test_the_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "o.jsonl.job").mkdir()
    with pytest.raises(UserError, match=r"o\.jsonl\.job: cannot be written: Is a directory"):
        begin(tmp_path / "o.jsonl")


# OpenAI's batch format


def request(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "any", **body}}


ASK = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "A"}]}]


def test_openai_batches(hello: Path, tmp_path: Path) -> None:
    lines = [
        request("a", messages=ASK, max_tokens=3, user="me", stream=False, tools=[], n=None),
        request("b", messages=ASK, max_completion_tokens=1, logprobs=True, top_logprobs=2, temperature=0, stop=None),
        request("c", "/v1/completions", prompt="A", stop=["世"], max_tokens=20),
        request("d", "/v1/completions", prompt=[ord("A")], n=2, temperature=1, logprobs=1),
        request("e", messages=ASK, tools=[{"type": "function"}]),
        request("f", "/v1/embeddings", input="A"),
        {"custom_id": "g", "body": {"messages": []}},
        {"prompt": "A"},
        request("i", messages=ASK, temperature=-1),
        request("j", messages=ASK, stream=True),
        request("k", messages=ASK, response_format={"type": "json_object"}),
    ]
    source, output = write_jsonl(tmp_path / "batch.jsonl", lines), tmp_path / "o.jsonl"
    assert generate("--model", hello, "--prompts", source, "--output", output).code == 3
    found = records(output)
    assert [record["custom_id"] for record in found] == [*"abcdefg", None, *"ijk"]
    assert [record["response"]["status_code"] for record in found] == [200] * 4 + [400] * 7
    a, b, c, d = (record["response"]["body"] for record in found[:4])
    assert (a["object"], a["model"], a["usage"]["completion_tokens"]) == ("chat.completion", hello.name, 3)
    assert a["choices"][0]["message"]["role"] == "assistant"
    assert a["choices"][0]["finish_reason"] == "length"
    assert a["choices"][0]["logprobs"] is None
    assert b["usage"]["completion_tokens"] == 1
    assert len(b["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert (c["object"], c["choices"][0]["text"], c["choices"][0]["finish_reason"]) == ("text_completion", "é", "stop")
    assert [choice["index"] for choice in d["choices"]] == [0, 1]
    assert d["usage"]["prompt_tokens"] == 1
    messages = [record["error"]["message"] for record in found[4:]]
    for message, part in zip(
        messages,
        ["tools", "url must be", "at least one", "custom_id", "temperature", "stream", "response_format"],
        strict=True,
    ):
        assert part in message
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:5]))
    assert generate("--model", hello, "--prompts", source, "--output", output, "--resume").code == 3
    assert [record["id"] for record in records(output)] == [f"batch_req_{i}" for i in range(11)]


def test_openai_batches_for_people_and_through_pipes(hello: Path) -> None:
    text = json.dumps(request("a", "/v1/completions", prompt="A")).encode()
    piped = ("--model", hello, "--format", "openai", "-")
    assert generate(*piped, stdin=text).out == HELLO + "\n"
    (record,) = generate(*piped, "--json", stdin=text).records
    assert record["response"]["body"]["choices"][0]["text"] == HELLO
    outcome = generate(*piped, "--json", stdin=b"{")
    assert "not JSON" in outcome.records[0]["error"]["message"]


# The prefix cache


@pytest.mark.parametrize("form", ["jsonl", "openai"])
def test_usage_and_last_line_tell_what_was_cached(tmp_path: Path, hello: Path, form: str) -> None:
    """Four prompts of 11 tokens (BOS and 10 letters) of which 8 fill two blocks; the first finds nothing."""
    texts = ["BBBBBBBBA" + letter for letter in "ABCD"]
    lines: list[object] = [{"prompt": text} for text in texts]
    if form == "openai":
        lines = [request(text, "/v1/completions", prompt=text) for text in texts]
    path = write_jsonl(tmp_path / "p.jsonl", lines)
    common = ("--model", hello, "--json", "--raw", "--greedy", "--block-size", 4, "--prompts", path)
    for option, expected in (("--prefix-cache", [0, 8, 8, 8]), ("--no-prefix-cache", [0, 0, 0, 0])):
        outcome = generate(*common, option)
        assert outcome.code == 0
        bodies = [r["response"]["body"] if form == "openai" else r for r in outcome.records]
        usages = [body["usage"] for body in bodies]
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == expected
        assert [usage["prompt_tokens"] for usage in usages] == [11] * 4
        assert ("44 tokens in (24 cached, 54.5%), " in outcome.err) == any(expected)
