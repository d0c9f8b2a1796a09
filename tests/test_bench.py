"""bench: the command line (C11), what is counted and timed, what is refused. The arithmetic is in test_bench_parts."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from models import write_rand

from tinyvllm_cli.bench import suite
from tinyvllm_cli.bench.measure import Meter
from tinyvllm_cli.bench.session import Session
from tinyvllm_cli.bench.workloads import Case, find_workload, grid, workload_case
from tinyvllm_cli.cli import main
from tinyvllm_cli.engine.sequence import SamplingParams
from tinyvllm_cli.errors import ExitCode, UserError

SMALL = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 96, "max_position": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand(tmp_path_factory.mktemp("bench") / "rand", **SMALL)


Bench = Any


@pytest.fixture
def bench(folder: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs `tinyvllm bench` on the small model; returns exit code, stdout and stderr."""

    def run(*arguments: str, model: bool = True) -> tuple[int, str, str]:
        chosen = ("--model", str(folder)) if model else ()
        with pytest.raises(SystemExit) as leaving:
            main(["bench", "--device", "cpu", *chosen, *arguments])
        out, err = capsys.readouterr()
        return int(leaving.value.code or 0), out, err

    return run


def strict_json(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


GRID = ("-p", "16,32", "-n", "8", "-b", "1,2")


@pytest.mark.parametrize("repetitions", [1, 3])
def test_json_counts_what_was_asked_and_keeps_the_samples(bench: Bench, repetitions: int) -> None:
    code, out, err = bench(*GRID, "-r", str(repetitions), "--json")
    assert code == ExitCode.OK
    assert "decode 2x8@32" in err
    content = strict_json(out)
    environment, results = content["environment"], content["results"]
    assert environment["settings"] | {"engine": 0} == environment["settings"] | {
        "warmup": True, "repetitions": repetitions, "prefix_cache": False, "seed": 0, "engine": 0,
    }  # fmt: skip
    assert {"torch", "numpy"} <= environment["packages"].keys()
    assert environment["device"] == "cpu"
    assert environment["ceiling"]["read_bytes_per_second"] > 0
    rows = {(row["test"], row["batch"], row["prompt_tokens"], row["generated_tokens"]) for row in results}
    assert rows == {(test, b, p, n) for test, n in (("prefill", 1), ("decode", 8)) for b in (1, 2) for p in (16, 32)}
    assert len(results) == len(rows)
    for row in results:
        assert len(row["samples"]) == repetitions
        tokens = row["batch"] * (row["prompt_tokens"] if row["test"] == "prefill" else row["generated_tokens"])
        rates = [tokens / seconds for seconds in row["samples"]]
        assert row["tokens_per_second"] == pytest.approx(statistics.fmean(rates))
        assert row["tokens_per_second_std"] == pytest.approx(statistics.stdev(rates) if repetitions > 1 else 0)
        steps = 1 if row["test"] == "prefill" else 8
        assert row["ms_per_step"] == pytest.approx(1e3 * statistics.median(row["samples"]) / steps)
        assert 0 < row["share_of_ceiling"] < math.inf
        assert row["peak_memory"] > 2**20


def test_csv_and_markdown_are_pure_and_whole(bench: Bench) -> None:
    _, out, _ = bench("-p", "16", "-n", "4", "-b", "1", "-r", "2", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["test"] for row in rows] == ["prefill", "decode"]
    assert all(len(json.loads(row["samples"])) == 2 and float(row["tokens_per_second"]) > 0 for row in rows)
    _, out, _ = bench("-p", "16", "-n", "4", "-b", "1", "-r", "1", "--markdown")
    lines = [line for line in out.splitlines() if line]
    assert all(line.startswith(("- ", "### ", "| ")) or re.fullmatch(r"[| -]+", line) for line in lines)
    assert sum("prefill 1x16" in line or "decode 1x4@16" in line for line in lines) == 2


def test_tables_fit_eighty_columns(bench: Bench) -> None:
    _, out, err = bench("-p", "16", "-n", "4", "-b", "1", "-r", "2")
    assert "Roofline" in out
    assert "prefill 1x16" in err
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.parametrize("warmup", [True, False])
def test_warm_up_is_no_sample_and_prompts_are_always_new(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, warmup: bool
) -> None:
    runs: list[tuple[list[list[int]], int]] = []
    original = Meter.run

    def spy(self: Meter, prompts: Any, params: Any, arrivals: Any = None) -> Any:
        runs.append((prompts, params[0].max_tokens))
        return original(self, prompts, params, arrivals)

    monkeypatch.setattr(Meter, "run", spy)
    code, out, _ = bench("-p", "16", "-n", "4", "-b", "2", "-r", "3", "--json", *([] if warmup else ["--no-warmup"]))
    assert code == ExitCode.OK
    content = strict_json(out)
    assert content["environment"]["settings"]["warmup"] is warmup
    assert [len(row["samples"]) for row in content["results"]] == [3, 3]
    rounds = 3 + 2 * warmup
    again = content["results"][1]["discarded"]
    pairs = ([1, 5, 5, 1] * (rounds + again))[: 2 * (rounds + again)]  # the order changes each time
    assert [wanted for _, wanted in runs] == [1] * (rounds + (not warmup)) + pairs
    prompts = [tuple(prompt) for batch, _ in runs for prompt in batch]
    assert len(set(prompts)) == len(prompts) == 2 * (3 * rounds + (not warmup) + 2 * again)
    assert all(len(prompt) == 16 for prompt in prompts)


def test_depth_comes_before_the_prompt(bench: Bench) -> None:
    _, out, _ = bench("-p", "128", "-n", "8", "-b", "1", "-d", "0,16", "-r", "1", "--json")
    rows = [(row["test"], row["depth"], row["prompt_tokens"]) for row in strict_json(out)["results"]]
    assert rows == [("prefill", 0, 128), ("decode", 0, 128), ("prefill", 16, 128), ("decode", 16, 128)]


def test_a_workload_file_is_run_and_arrivals_bring_latencies(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text('{"prompt_tokens": 7, "generated_tokens": 5}\n\n{"token_ids": [1, 2, 3], "generated_tokens": 2}\n')
    _, out, _ = bench("--workload", str(path), "-r", "2", "--json")
    (row,) = strict_json(out)["results"]
    assert (row["test"], row["name"], row["batch"]) == ("workload", "work.jsonl", 2)
    assert (row["prompt_tokens"], row["generated_tokens"], row["latency"]) == (10, 7, None)
    code, out, err = bench("--workload", str(path), "-r", "2", "--rate", "200", "--json")
    (row,) = strict_json(out)["results"]
    assert code == ExitCode.OK, err
    assert row["rate"] == 200
    assert row["latency"].keys() == {"time_to_first_token_ms", "time_between_tokens_ms", "request_ms"}
    for values in row["latency"].values():
        assert 0 < values["p50"] <= values["p90"] <= values["p99"]
    assert row["share_of_ceiling"] is None  # the time is that of the arrivals
    _, out, _ = bench("--workload", str(path), "-r", "1", "--rate", "200")
    assert "time to first token" in out


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ('{"generated_tokens": 3}', "either prompt_tokens or token_ids"),
        ('{"prompt_tokens": 3}', "generated_tokens is 0"),
        ('{"prompt_tokens": 0, "generated_tokens": 1}', "prompt_tokens is 0"),
        ('{"prompt_tokens": true, "generated_tokens": 1}', "prompt_tokens is True"),
        ('{"token_ids": [-1], "generated_tokens": 1}', "no list of token ids"),
        ('{"prompt_tokens": 3, "generated_tokens": 1, "n": 1}', "unknown key 'n'"),
    ],
)
def test_a_wrong_workload_is_refused_with_its_line(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text('{"prompt_tokens": 7, "generated_tokens": 5}\n' + line)
    with pytest.raises(UserError, match=f"line 2: .*{re.escape(fault)}"):
        find_workload(str(path))


def test_a_token_outside_of_the_vocabulary_is_an_error_row(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text('{"token_ids": [5000], "generated_tokens": 2}\n')
    code, out, _ = bench("--workload", str(path), "--json")
    assert code == ExitCode.ERROR
    assert "vocabulary of 300" in strict_json(out)["results"][0]["error"]


def test_a_row_that_fails_says_why_and_the_suite_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Meter.measure, []

    def sometimes(self: Meter, case: Case, repetitions: int, budget_s: float = 0) -> Any:
        calls.append(self.llm)
        if len(calls) == 1:
            self.llm.engine.add([1, 2], SamplingParams())  # left behind in the engine
            raise RuntimeError("a kernel has failed")
        return original(self, case, repetitions, budget_s)

    monkeypatch.setattr(Meter, "measure", sometimes)
    only = "decode 1 x 128,prefill 1 x 512,prefill 1 x 8192"
    code, _, err = bench("--suite", "targets", "--only", only, "-r", "1", "--json")
    assert code == ExitCode.ERROR, err  # the model is too short for any of them
    monkeypatch.setattr(suite, "targets", lambda: {"rows": [_short(row) for row in original_targets["rows"][:3]]})
    calls.clear()
    code, out, err = bench("--suite", "targets", "-r", "1", "--json")
    assert code == ExitCode.PARTIAL
    rows = strict_json(out)["results"]
    assert rows[0]["error"].startswith("RuntimeError: a kernel has failed")
    assert "value" not in rows[0]["target"]
    assert [row["error"] for row in rows[1:]] == [None, None]
    assert calls[0] is not calls[1] is calls[2]  # a fresh engine after the failure
    assert "a kernel has failed" in err
    for row in rows[1:]:
        target = row["target"]
        assert target["value"] == row["ms_per_step"]
        assert target["meets_must"] is (row["ms_per_step"] <= target["must"])
        assert target["times_peer"] == pytest.approx(target["peer"] / row["ms_per_step"])


original_targets = suite.targets()


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"batch": 2, "prompt_tokens": 16, "generated_tokens": 8}


def test_the_suite_ends_in_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "targets", lambda: {"rows": [_short(row) for row in original_targets["rows"][:2]]})
    monkeypatch.setattr(suite, "SECONDS", -1.0)
    _, out, _ = bench("--suite", "targets", "--json")
    assert all("left out" in row["error"] for row in strict_json(out)["results"])


def test_the_targets_are_the_rows_and_their_tables(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = suite.suite_cases("targets")
    assert [case.test for case in cases].count("start") == 5
    assert len(cases) == 18
    assert [case.name for case in suite.suite_cases("targets", ("mixed",))] == ["mixed job"]
    with pytest.raises(UserError, match="no row"):
        suite.suite_cases("targets", ("nothing",))
    monkeypatch.setattr(suite, "targets", lambda: {"rows": [_short(row) for row in original_targets["rows"][:2]]})
    _, out, _ = bench("--suite", "targets", "-r", "1")
    assert "Targets" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_a_baseline_is_read_before_and_shown_after(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    _, out, _ = bench("-p", "16", "-n", "4", "-b", "1", "-r", "3", "--json")
    before = strict_json(out)
    for row in before["results"]:
        row["samples"] = [100 * seconds for seconds in row["samples"]]
    before["environment"]["dtype"] = "bfloat16"
    path.write_text(json.dumps(before))
    _, out, err = bench("-p", "16", "-n", "4", "-b", "1", "-r", "3", "--baseline", str(path), "--json")
    assert "dtype is float32, was bfloat16" in err
    for row in strict_json(out)["results"]:
        assert row["baseline"]["speedup"] > 2
    code, _, err = bench("--baseline", str(tmp_path / "nothing.json"))
    assert code == ExitCode.ERROR
    assert "no result of an earlier run" in err


def test_every_op_is_timed_alone(bench: Bench) -> None:
    _, out, _ = bench("-p", "16", "-n", "4", "-b", "1,3", "--kernels", "--json")
    content = strict_json(out)
    assert content["results"] == []
    ops = {(kernel["op"], kernel["what"], kernel["phase"], kernel["tokens"]) for kernel in content["kernels"]}
    assert {("linear", what, "decode", 3) for what in ("qkv", "o", "gate_up", "down", "logits")} <= ops
    assert {("attention_prefill", "", "prefill", 16), ("attention_decode", "", "decode", 1)} <= ops
    assert {op for op, *_ in ops} == {
        "embedding", "rms_norm", "add_rms_norm", "linear", "rope_store", "silu_mul", "attention_decode",
        "attention_prefill", "sample",
    }  # fmt: skip
    assert all(kernel["us"] > 0 and len(kernel["samples"]) > 1 for kernel in content["kernels"])


def test_transformers_does_the_same_work_in_its_own_process(bench: Bench) -> None:
    code, out, err = bench(
        "-p", "16", "-n", "4", "-b", "2", "-r", "2", "-d", "0,8", "--compare", "transformers", "--json"
    )
    assert code == ExitCode.OK, err
    rows = strict_json(out)["results"]
    for row in rows:
        (peer,) = row["peers"]
        if row["test"] == "prefill" and row["depth"]:
            assert peer["error"].startswith("not the same work")
        else:
            assert len(peer["samples"]) == 2, peer
            expected = statistics.median(peer["samples"]) / statistics.median(row["samples"])
            assert peer["ratio"] == pytest.approx(expected)


def test_a_plot_is_an_svg_and_nothing_else(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "roof.svg"
    code, _, _ = bench("-p", "16", "-n", "0", "-b", "1,2", "-r", "1", "--plot", str(path), "--json")
    assert code == ExitCode.OK
    circles = ElementTree.parse(path).getroot().findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 2
    code, out, err = bench("--plot", str(tmp_path / "roof.png"))
    assert (code, out) == (ExitCode.USAGE, "")
    assert ".png cannot be drawn" in err


def test_what_peers_cannot_do_alike_is_refused(bench: Bench) -> None:
    code, _, err = bench("--workload", "nano", "--compare", "transformers")
    assert code == ExitCode.ERROR
    assert "unequal length" in err


def test_shapes_by_name_and_by_file(bench: Bench, folder: Path) -> None:
    small = ("-p", "8", "-n", "0", "-b", "1", "-r", "1", "--json")
    _, out, err = bench("--shape", str(folder / "config.json"), *small, model=False)
    environment = strict_json(out)["environment"]
    assert (environment["model"], environment["random_weights"]) == ("rand/config.json", True)
    assert "random weights" in err
    code, _, err = bench("--shape", "2B", model=False)
    assert code == ExitCode.USAGE
    assert "Llama-3.2-1B" in err


def test_a_session_measures_on_each_device(device: str, tmp_path: Path) -> None:
    model = write_rand(tmp_path / "rand", dtype="bfloat16", head_dim=64, **SMALL)
    nano = workload_case(find_workload("nano"), 4)
    session = Session(model, device, grid((19, 96), (8,), (1, 3), (0,)) + grid((96,), (8,), (3,), (16,)))
    for case in session.cases:
        result = session.measure(case, 2)
        assert result.error is None
        assert len(result.samples) == 2
    assert session.measure(nano, 1).error is not None  # too long for this model
    session.isolated = True
    assert len(session.measure(session.cases[1], 2).samples) == 2
