"""Penalties, log-probabilities and shared prompts through the whole model, against plain recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from test_model import generate, random_prompts

from tinyvllm_cli.engine.sequence import SamplingParams, Sequence
from tinyvllm_cli.llm import LLM
from tinyvllm_cli.model.runner import ModelRunner

PROMPTS = random_prompts([3, 17, 40, 33, 8], seed=4)
FEW_BLOCKS: dict[str, Any] = {"num_kv_blocks": 14, "block_size": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "all": {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 1.2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_rand(tmp_path_factory.mktemp("rand"), dtype="bfloat16")


class Oracle:
    """Logits of transformers, and what penalties make of them."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        dtypes = (torch.float32, torch.bfloat16)
        self.models = {dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for dtype in dtypes}

    def logits(
        self, prompt: list[int], answer: list[int], params: SamplingParams, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """For each token of the answer the logits that it was chosen by, fp32 [len(answer), V], computed in `dtype`."""
        with torch.no_grad():
            rows = self.models[dtype](torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :].float()
        for place, row in enumerate(rows):
            for token in {*prompt, *answer[:place]}:
                factor = params.repetition_penalty
                row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
            for token in answer[:place]:
                row[token] -= params.frequency_penalty
            for token in set(answer[:place]):
                row[token] -= params.presence_penalty
        return rows

    def allowed_error(self, sequence: Sequence, device: str) -> float:
        """Of a log-probability: on CUDA, which computes in bf16, twice that of transformers' own bf16."""
        if device == "cpu":
            return 1e-3
        of = sequence.prompt_token_ids, sequence.output_token_ids, sequence.params
        exact, rounded = self.logits(*of).log_softmax(-1), self.logits(*of, torch.bfloat16).log_softmax(-1)
        return 2 * float((exact - rounded).abs().max())

    def check(self, prompt: list[int], answer: list[int], params: SamplingParams, device: str) -> None:
        """Each token is the best one, or within rounding of it."""
        logits = self.logits(prompt, answer, params)
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        assert float((logits.amax(1) - chosen).max()) <= (0.15 if device == "cuda" else 1e-3)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("limits", [{}, FEW_BLOCKS, {"run_ahead": 2, "max_num_seqs": 2}], ids=str)
def test_penalties(device: str, folder: Path, oracle: Oracle, name: str, limits: dict[str, Any]) -> None:
    """Also when sequences are preempted, and when rows change their owners; every second one has no penalties."""
    params = SamplingParams(max_tokens=30, ignore_eos=True, **SETTINGS[name])
    plain = SamplingParams(max_tokens=30, ignore_eos=True)
    llm = LLM(folder, device=device, **limits)
    of = [params if i % 2 == 0 else plain for i in range(len(PROMPTS))]
    sequences = [llm.engine.add(prompt, p) for prompt, p in zip(PROMPTS, of, strict=True)]
    while llm.engine.has_work:
        llm.engine.step()
    assert (llm.engine.statistics.preemptions > 0) == (limits is FEW_BLOCKS)
    for sequence in sequences:
        oracle.check(sequence.prompt_token_ids, sequence.output_token_ids, sequence.params, device)
    assert sequences[0].output_token_ids != generate(llm, [PROMPTS[0]], 30)[0]


@pytest.mark.parametrize("limits", [{}, FEW_BLOCKS, {"run_ahead": 2, "max_num_seqs": 2}], ids=str)
def test_logprobs(device: str, folder: Path, oracle: Oracle, limits: dict[str, Any]) -> None:
    llm = LLM(folder, device=device, **limits)
    count, sequences = [0, 5, None, 20, 2], []
    for prompt, number in zip(PROMPTS, count, strict=True):
        params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=number, presence_penalty=0.5, temperature=0.7)
        sequences.append(llm.engine.add(prompt, params))
    while llm.engine.has_work:
        llm.engine.step()
    for sequence, number in zip(sequences, count, strict=True):
        if number is None:
            assert sequence.output_logprobs == []
            continue
        truth = oracle.logits(sequence.prompt_token_ids, sequence.output_token_ids, sequence.params).log_softmax(-1)
        error = oracle.allowed_error(sequence, device)
        assert [told.token_ids[0] for told in sequence.output_logprobs] == sequence.output_token_ids
        for told, row in zip(sequence.output_logprobs, truth, strict=True):
            assert len(told.token_ids) == len(told.values) == number + 1
            assert told.values[1:] == sorted(told.values[1:], reverse=True)
            expected = row[told.token_ids].tolist()
            assert told.values == pytest.approx(expected, abs=error)
            if device == "cpu":
                assert told.values[1:] == pytest.approx(row.topk(number).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("limits", [{}, FEW_BLOCKS, {"run_ahead": 2, "max_num_seqs": 3}], ids=str)
def test_samples_of_one_prompt_are_those_of_prompts_of_their_own(
    device: str, folder: Path, limits: dict[str, Any]
) -> None:
    params = SamplingParams(n=5, max_tokens=12, ignore_eos=True, temperature=1.0, seed=3, presence_penalty=0.4)
    alone = LLM(folder, device=device)
    expected = [
        [generate(alone, [prompt], 12, temperature=1.0, seed=3 + i, presence_penalty=0.4)[0] for i in range(5)]
        for prompt in PROMPTS
    ]
    llm = LLM(folder, device=device, **limits)
    families: list[list[Sequence]] = []
    for prompt in PROMPTS:
        family = [llm.engine.add(prompt, params.of_sample(0))]
        family += [llm.engine.add(prompt, params.of_sample(i), family[0]) for i in range(1, 5)]
        families.append(family)
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.engine.scheduler.pool.num_used == 0
    answers = [[sequence.output_token_ids for sequence in family] for family in families]
    if device == "cpu":
        assert answers == expected
        whole = 5 * sum(len(prompt) for prompt in PROMPTS) + 5 * 5 * 11  # the last token of each is not computed
        assert limits is FEW_BLOCKS or llm.engine.statistics.computed_tokens < whole
    else:  # bf16: a draw may fall on the other side of a boundary, and what follows differs
        equal = sum(
            a == e for family, own in zip(answers, expected, strict=True) for a, e in zip(family, own, strict=True)
        )
        assert equal > 12


def test_without_penalties_and_logprobs_nothing_more_is_done(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of most jobs calls none of the ops that this file is about, and keeps no room for them on the host."""
    from tinyvllm_cli import ops

    for name in ("penalize", "count_tokens", "logprobs"):
        monkeypatch.delattr(ops, name)
    llm = LLM(folder, device=device)
    generate(llm, PROMPTS, 8, temperature=0.8)
    runner: ModelRunner = llm.runner
    assert runner.logprob_downloads == []
    assert device == "cpu" or not any(key[1] is True for key in runner.graphs.captured)  # penalties
