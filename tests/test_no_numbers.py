"""Logits that are no numbers end a job by name, on the CPU and on every way to a token of the GPU.

The model goes from A to B, C, X and back to A, and from a to b, c and a. A fault spoils what comes behind C.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from files import write_shards
from models import EOS, chain, write_chain
from program import generate, write_jsonl
from safetensors.numpy import load_file

from tinyvllm_cli.engine.sequence import LogitsError, SamplingParams
from tinyvllm_cli.llm import LLM

C = ord("C")
HUGE = 3e38
"""Times what the last norm gives of a token, 22.6, it is beyond float32."""
FAULTS: dict[str, tuple[str, Any, float]] = {  # tensor, place, value
    "NaN": ("model.embed_tokens.weight", (C, 7), math.nan),
    "infinity": ("model.embed_tokens.weight", (C, 7), math.inf),
    "an infinite logit": ("lm_head.weight", (50, C), HUGE),
    "all logits -inf": ("lm_head.weight", (slice(None), C), -HUGE),
}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "all filters": {"temperature": 1.0, "top_k": 5, "min_p": 0.1, "top_p": 0.9},
    "penalties": {"presence_penalty": 0.5},
    "penalties, drawn": {"temperature": 1.0, "repetition_penalty": 1.1},
    "logprobs": {"logprobs": 2},
    "logprobs, drawn": {"temperature": 1.0, "logprobs": 0},
}


def write_broken(folder: Path, fault: tuple[str, Any, float], **options: Any) -> Path:
    write_chain(folder, chain("A", "B", "C", "X", "A") | chain("a", "b", "c", "a"), **options)
    tensors = load_file(folder / "model.safetensors")
    name, place, value = fault
    tensors[name][place] = value
    write_shards(folder, tensors)
    return folder


def text_of(llm: LLM, prompt: str, **params: Any) -> str:
    (output,) = llm.generate(prompt, SamplingParams(**params))
    return output.outputs[0].text


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, bool], LLM]:
    """The LLM with a fault, made once."""
    made: dict[tuple[str, str, bool], LLM] = {}

    def make(fault: str, device: str, graphs: bool) -> LLM:
        key = fault, device, graphs
        if key not in made:
            folder = write_broken(tmp_path_factory.mktemp("broken"), FAULTS[fault])
            made[key] = LLM(folder, device=device, graphs=graphs, num_kv_blocks=64, max_model_len=128)
        return made[key]

    return make


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_one_of_many_sequences(device: str, broken: Callable[..., LLM], fault: str, params: str, graphs: bool) -> None:
    """It has no next token in some decode, whatever the batch; and the others can be answered before and after."""
    if device == "cpu" and graphs:
        pytest.skip("graphs are for CUDA")
    llm, options = broken(fault, device, graphs), SamplingParams(max_tokens=9, ignore_eos=True, **PARAMS[params])
    for count in (1, 3, 9, 17):
        place = count // 2
        before = llm.generate(["a"] * count, options)
        with pytest.raises(LogitsError) as caught:
            llm.generate([*["a"] * place, "A", *["a"] * (count - place - 1)], options)
        assert caught.value.where == f"prompt {place + 1} of {count}"
        assert not llm.engine.has_work
        assert llm.engine.scheduler.pool.num_used == 0
        after = llm.generate(["a"] * count, options)
        assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]


@pytest.mark.parametrize("prompt", ["C", "ABC", "CAB"])
@pytest.mark.parametrize("fault", FAULTS)
def test_at_the_end_of_a_prompt(device: str, broken: Callable[..., LLM], fault: str, prompt: str) -> None:
    llm = broken(fault, device, True)
    for temperature in (0.0, 1.0):
        with pytest.raises(LogitsError, match="no numbers"):
            text_of(llm, prompt, max_tokens=1, temperature=temperature) and text_of(llm, prompt, max_tokens=9)


def test_an_impossible_token_is_no_fault(device: str, tmp_path: Path) -> None:
    llm = LLM(write_broken(tmp_path, ("lm_head.weight", (50, C), -HUGE)), device=device, num_kv_blocks=64)
    for params in PARAMS.values():
        assert text_of(llm, "A", max_tokens=6, **{**params, "presence_penalty": 0}) == "BCXABC"


def test_nobody_asks_for_what_comes_behind_the_end(device: str, tmp_path: Path) -> None:
    """The device goes on for a while when a sequence has ended; what it finds then is nobody's."""
    llm = LLM(
        write_broken(tmp_path, ("model.embed_tokens.weight", (EOS, 7), math.nan)),
        device=device, run_ahead=3, num_kv_blocks=64,
    )  # fmt: skip
    answers = llm.generate(["x", "a", "A"], SamplingParams(max_tokens=12))
    assert [output.outputs[0].text for output in answers] == ["", "bca" * 4, "BCXA" * 3]


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("options", [(), ("-t", 1), ("--logprobs", 2), ("-t", 1, "--top-k", 9)], ids=str)
def test_the_program_says_what_to_do(tmp_path: Path, options: tuple[object, ...]) -> None:
    model = write_broken(tmp_path, ("lm_head.weight", (77, 3), math.nan))
    done = generate("--model", model, "a", "--json", *options)
    assert (done.code, done.out) == (1, "")
    assert "prompt 1: the model computes no numbers (NaN or infinite)" in done.err
    assert "--check-data" in done.err
    assert "--dtype" in done.err


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("order", ["input", "finished"])
def test_what_is_finished_stays_written(tmp_path: Path, order: str) -> None:
    model, output = write_broken(tmp_path / "m", FAULTS["NaN"]), tmp_path / "o.jsonl"
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "A" if i == 6 else "a"} for i in range(12)])
    common = ("--model", model, "--prompts", prompts, "-n", 8, "--max-num-seqs", 1, "--order", order)
    done = generate(*common, "--output", output)
    assert (done.code, done.out) == (1, "")
    assert "line 7: the model computes no numbers" in done.err
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(record["index"], record["text"]) for record in records] == [(i, "bcabcabc") for i in range(6)]
