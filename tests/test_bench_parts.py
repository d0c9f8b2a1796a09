"""The parts of bench that need no engine: work and floors, statistics, shapes, jobs, noise, plots, peers."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyvllm_cli import gemm
from tinyvllm_cli.bench import start, suite
from tinyvllm_cli.bench.baseline import change
from tinyvllm_cli.bench.ceiling import measure_ceiling
from tinyvllm_cli.bench.compare import PEERS, check_peer, hf_config, reason
from tinyvllm_cli.bench.environment import describe
from tinyvllm_cli.bench.kernels import measure_kernels
from tinyvllm_cli.bench.shapes import SHAPES, find_shape
from tinyvllm_cli.bench.stats import percentile, std
from tinyvllm_cli.bench.traffic import Ceiling, Model, Part, Work
from tinyvllm_cli.bench.workloads import Case, Request, Workload, grid, nano, prefix, with_rate, workload_case
from tinyvllm_cli.checkpoint.config import ModelConfig, read_config
from tinyvllm_cli.checkpoint.index import open_checkpoint
from tinyvllm_cli.checkpoint.names import map_weights, weights_layout
from tinyvllm_cli.checkpoint.weights import load_weights
from tinyvllm_cli.errors import UserError
from tinyvllm_cli.render.roofline import Point, svg_plot, text_plot

H200 = Ceiling(4.39e12, 790e12)


def test_the_kernels_of_a_hopper_step_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their references, where `linear` would take them on such a card."""
    monkeypatch.setattr(gemm, "suits_hopper", lambda x: 8 < x.size(0) <= 128)
    monkeypatch.setattr(gemm, "suits_argmax", lambda x: 8 < x.size(0) <= 128)
    monkeypatch.setattr(gemm, "suits_wide", lambda x, weight: x.size(0) > 128)
    monkeypatch.setattr(gemm, "suits_linear_wide", lambda x, weight: x.size(0) > 128)
    monkeypatch.setattr(gemm, "suits_add_wide", lambda x, weight: x.size(0) > 128)
    config = ModelConfig(64, 1, 1, 1, 64, 64, 72, 1e-5)
    results = list(measure_kernels(config, "cpu", "float32", H200, batches=[9, 129], context=20, prompts=[]))
    timed = {(result.op, result.what, result.tokens) for result in results}
    assert {("argmax_linear_hopper", "logits", 9), ("gated_linear_hopper", "gate_up", 9)} <= timed
    assert {("gated_linear_wide", "gate_up", 129), ("add_linear_wide", "down", 129)} <= timed
    assert {("linear_wide", "qkv", 129), ("add_linear_wide", "o", 129)} <= timed
    assert ("add_linear_hopper", "o", 9) in timed
    assert ("argmax_linear_hopper", "logits", 129) not in timed


ROWS = [row for row in suite.targets()["rows"] if row["test"] != "start"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_floors_are_those_of_the_targets(row: dict) -> None:
    case = next(case for case in suite.suite_cases("targets") if case.name == row["name"])
    floor = Model(SHAPES["Llama-3.2-1B"], 2).of(case).floor(H200)
    if row["unit"] == "tokens_per_second":
        assert case.generated_tokens / floor > row["aim"]
    else:
        steps = case.generated_tokens if row["test"] == "decode" else 1
        assert 1e3 * floor / steps == pytest.approx(row["floor"], rel=0.03)
    better = (row["peer"] < row["must"] < row["aim"]) if row["floor"] is None else (
        row["floor"] < row["aim"] < row["must"] < row["peer"]
    )  # fmt: skip
    assert better


def test_the_targets_say_what_they_are_of() -> None:
    same = {"card": "NVIDIA H200", "model": "Llama-3.2-1B", "dtype": "bfloat16"}
    assert suite.differences(same) == []
    found = suite.differences({"model": "demo", "dtype": "bfloat16"})
    assert found == ["their card is NVIDIA H200, this is none", "their shape is Llama-3.2-1B, this is demo"]


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 40), st.integers(1, 12))
def test_work_counts_every_pair_of_tokens(batch: int, tokens: int, depth: int, steps: int) -> None:
    model = Model(SHAPES["SmolLM2-135M"], 4)
    pairs = batch * sum(depth + i + 1 for i in range(tokens))
    prefill = model.prefill(batch, tokens, depth)
    assert prefill.parts[2].flops == pairs * model.attention_flops
    assert prefill.parts[0].flops == batch * tokens * model.layer_flops
    read = batch * sum(depth + i + 1 for i in range(steps))
    decode = model.decode(batch, depth, steps)
    assert decode.parts[2].nbytes == read * model.kv_bytes
    assert decode.parts[0].nbytes == steps * model.layer_bytes
    job = model.job((Request(tokens, steps + 1),), max_num_seqs=1)
    assert job.flops == model.prefill(1, tokens).flops + model.decode(1, tokens, steps).flops


def test_the_floor_is_that_of_what_bounds_each_part() -> None:
    work = Work((Part(100, 1), Part(1, 100)))
    assert work.floor(Ceiling(10, 10)) == 20
    assert (work.nbytes, work.flops) == (101, 101)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("1B", 1235.8), ("3B", 3212.7), ("8b", 8030.3), ("smollm2-135m", 134.5), ("SmolLM2-360M", 361.8),
     ("SmolLM2-1.7B", 1711.4)],
)  # fmt: skip
def test_shapes_have_the_parameters_of_their_models(name: str, millions: float) -> None:
    _, config = find_shape(name)
    slots, _ = weights_layout(config, 1)
    assert sum(math.prod(slot.shape) for slot in slots) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize("name", SHAPES)
def test_others_read_our_shapes_as_we_do(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(hf_config(SHAPES[name])))
    assert read_config(tmp_path) == SHAPES[name]
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.rope_parameters["rope_theta"] == SHAPES[name].rope.theta
    assert theirs.rope_parameters["rope_type"] == SHAPES[name].rope.kind
    assert theirs.head_dim == SHAPES[name].head_dim


def test_the_mixed_job_is_the_one_of_the_targets() -> None:
    job = workload_case(nano(), 256)
    assert (job.batch, job.prompt_tokens, job.generated_tokens) == (256, 142_827, 133_966)
    assert nano().temperature == 0.6
    assert with_rate(nano(), 2.5).rate == 2.5


def test_a_common_beginning_is_the_least_work_once() -> None:
    """With the cache, the layers and the attention see the 2,000 common tokens once, and 32 of each prompt's own."""
    case, model = workload_case(prefix(), 256), Model(SHAPES["Llama-3.2-1B"], 2)
    assert (case.prompt_tokens, case.generated_tokens) == (2_032_000, 32_000)
    cached, plain = model.of(case, True), model.of(case)
    first, every, other = model.prefill(1, 2000), model.prefill(1, 32, depth=2000), model.prefill(1, 2032)
    saved = 1000 * other.flops - 1000 * every.flops - (first.flops - model.head_flops)
    assert plain.flops - cached.flops == pytest.approx(saved)
    assert saved > 0.9 * plain.flops


def test_a_grid_is_every_combination_once() -> None:
    cases = grid((512, 2048), (128,), (1, 8), (0, 4096))
    assert len(cases) == len(set(cases)) == 2 * 2 * 2 * 2
    assert [c.test for c in grid((16,), (0,), (1,), (0,))] == ["prefill"]
    (alone,) = grid((0,), (8,), (1,), (0,))
    assert (alone.test, alone.prompt_tokens, alone.depth) == ("decode", 1, 0)
    (deep,) = grid((0,), (8,), (1,), (64,))
    assert (deep.test, deep.prompt_tokens, deep.depth, deep.context) == ("decode", 0, 64, 73)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.1, 100))
def test_a_percentile_is_an_observed_value_that_so_many_do_not_exceed(values: list[float], percent: float) -> None:
    value = percentile(values, percent)
    assert value in values
    assert sum(v <= value for v in values) >= percent / 100 * len(values) - 1e-9
    assert sum(v < value for v in values) < percent / 100 * len(values) + 1e-9


def test_the_deviation_of_one_sample_is_none() -> None:
    assert std([3.0]) == 0.0
    assert std([1.0, 2.0, 4.0]) == statistics.stdev([1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("now", "before", "beyond"),
    [
        ([1.0, 1.01, 0.99], [1.2, 1.21, 1.19], True),
        ([1.0, 1.01, 0.99], [1.0, 1.02, 0.99], False),
        ([1.0, 1.5, 0.5], [1.2, 1.7, 0.7], False),
        ([1.0, 1.0, 1.0], [1.005, 1.005, 1.005], False),  # a constant drift of less than 1%
        ([1.0], [2.0], None),
    ],
)
def test_only_differences_beyond_the_noise_count(now: list[float], before: list[float], beyond: bool | None) -> None:
    result = change(now, before)
    assert result["beyond_noise"] is beyond
    assert result["speedup"] == pytest.approx(statistics.fmean(before) / statistics.fmean(now))


def test_the_ceiling_is_the_best_of_what_was_measured(device: str) -> None:
    dtype = "float32" if device == "cpu" else "bfloat16"
    ceiling = measure_ceiling(torch.device(device), dtype)
    assert ceiling["read_bytes_per_second"] == max(ceiling["read_by"].values()) > 1e8
    assert ceiling["matmul_flops_per_second"] == max(ceiling["matmul_by"].values()) > 1e8
    assert describe(torch.device(device))["device"] == device


def test_plots_show_every_point_within_eighty_columns() -> None:
    points = [Point(f"<row {i}>", 2.0**i, 1e9 * 2**i) for i in range(60)]
    lines = text_plot(points, 1e10, 1e20)
    assert max(map(len, lines)) <= 80
    assert sum("<row" in line for line in lines) == 60
    root = ElementTree.fromstring(svg_plot(points, 1e10, 1e20, "<title> & more"))
    namespace = "{http://www.w3.org/2000/svg}"
    circles = root.findall(f"{namespace}circle")
    assert len(circles) == 60
    assert all(0 < float(c.attrib["cx"]) < 720 and 0 < float(c.attrib["cy"]) < 440 for c in circles)
    assert any(text.text == "<title> & more" for text in root.findall(f"{namespace}text"))


def test_what_is_not_the_same_work_has_its_reason() -> None:
    prefill, deep = Case("prefill", 1, 16, 1), Case("prefill", 1, 16, 1, depth=32)
    decode = Case("decode", 2, 16, 8, depth=32)
    job = workload_case(Workload("w", (Request(4, 4), Request(5, 5))), 2)
    late = workload_case(Workload("w", (Request(4, 4),), rate=1.0), 1)
    alike = workload_case(Workload("w", (Request(4, 4),), common_tokens=2), 1)
    given_ids = workload_case(Workload("w", (Request(2, 4, (1, 2)),)), 1)
    for peer in PEERS:
        assert reason(peer, prefill) == reason(peer, decode) == ""
        assert "prefix" in reason(peer, deep)
        assert "over time" in reason(peer, late)
    assert "padding" in reason("transformers", job)
    assert reason("vllm", job) == ""
    assert "prefix cache" in reason("vllm", given_ids)
    assert "beginning" in reason("vllm", alike)


def test_a_peer_that_is_missing_or_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyvllm_cli.bench import compare

    monkeypatch.setattr(compare.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="vllm is not installed"):
        check_peer("vllm", [Case("prefill", 1, 16, 1)])
    dead = subprocess.CompletedProcess([], 1, stdout='{"samples": []}\n', stderr="a traceback\nout of memory\n")
    monkeypatch.setattr(compare.subprocess, "run", lambda *_, **__: dead)
    answers = compare._ask("vllm", {"cases": [{}, {}, {}]})
    assert answers[0] == {"samples": []}
    assert all("status 1: a traceback / out of memory" in answer["error"] for answer in answers[1:])


def test_checkpoints_are_made_whole(tmp_path: Path) -> None:
    config = replace(SHAPES["SmolLM2-135M"], num_layers=2, vocab_size=1000)
    start.write_checkpoint(tmp_path, config)
    assert read_config(tmp_path).num_layers == 2
    weight_map = map_weights(config, open_checkpoint(tmp_path))
    weights = load_weights(config, weight_map, dtype=torch.float32, device=torch.device("cpu"))
    assert weights.layers[1].down.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", ["--help", "inspect of 141 GB", "weights to device", "start to first token"])
def test_starts_are_timed(name: str) -> None:
    config = replace(SHAPES["SmolLM2-135M"], num_layers=2)
    result = start.measure_start(Case("start", 0, 0, 0, name=name), config, "cpu", "float32", 2)
    assert len(result.samples) == 2
    assert result.ms == pytest.approx(1e3 * statistics.median(result.samples))


def test_a_start_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="generate has failed: "):
        start.measure_start(Case("start", 0, 0, 0, name="start to first token"), tmp_path, "cpu", "float32", 1)
    with pytest.raises(UserError, match="no extension on the CPU"):
        start.measure_start(Case("start", 0, 0, 0, name="extension is built"), tmp_path, "cpu", "float32", 1)
