"""The whole model through the paged engine, against transformers, whatever the limits; on the CPU and on CUDA.

On the CPU (fp32) the tokens must be the oracle's. On CUDA (bf16) they may part from them only where the oracle's two
best logits are closer than twice the error of torch's own bf16 forward on the same tokens. The prefix cache, which
would have repeated prompts computed in part only, has its own tests in test_model_prefix.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from answers import check_alike

from tinyvllm_cli.engine.sequence import SamplingParams
from tinyvllm_cli.errors import UserError
from tinyvllm_cli.llm import LLM
from tinyvllm_cli.memory.plan import ALWAYS

Tokens = list[list[int]]
DTYPES = (torch.float32, torch.bfloat16)


def generate(llm: LLM, prompts: Tokens, num_tokens: int, **params: Any) -> Tokens:
    """Greedy tokens, ignoring EOS unless told otherwise, in the order of prompts."""
    options = SamplingParams(**({"max_tokens": num_tokens, "ignore_eos": True} | params))
    sequences = [llm.engine.add(prompt, options) for prompt in prompts]
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.scheduler.pool.check()
    assert llm.engine.scheduler.pool.num_used == 0
    return [s.output_token_ids for s in sequences]


def random_prompts(lengths: list[int], seed: int = 1, vocab: int = 256) -> Tokens:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]


@dataclass
class Case:
    """A RAND model and the oracle's answer to some prompts.

    Attributes:
        gaps: difference of the two best logits at each step of each prompt.
        rounding: largest error of a logit in torch's own bf16 forward over prompts and answers.
    """

    folder: Path
    prompts: Tokens
    expected: Tokens
    gaps: list[list[float]]
    rounding: float

    def check(self, actual: Tokens, device: str, order: list[int] | None = None) -> None:
        """`actual` answers the prompts, those of `order` if given; it must agree as the head of this file says."""
        chosen = order if order is not None else list(range(len(self.prompts)))
        for i, tokens in zip(chosen, actual, strict=True):
            truth = self.expected[i]
            assert len(tokens) == len(truth)
            step = next((step for step in range(len(truth)) if tokens[step] != truth[step]), None)
            if step is not None:
                allowed = 2 * self.rounding if device == "cuda" else 0
                assert self.gaps[i][step] < allowed, f"prompt {i} parts at step {step}, gap {self.gaps[i][step]:.4f}"


def logits_of(folder: Path, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """transformers' logits, fp32 [len(ids), V], computed in `dtype`."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model(torch.tensor([ids])).logits[0].float()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """Makes a Case, with a seed whose gaps exceed fp32 rounding; cached by name."""
    made: dict[str, Case] = {}

    def make(name: str, lengths: list[int], num_tokens: int, **options: Any) -> Case:
        if name not in made:
            for seed in range(20):
                folder = models.write_rand(tmp_path_factory.mktemp(name), seed=seed, dtype="bfloat16", **options)
                prompts = random_prompts(lengths, seed)
                tokens, gaps = models.oracle_steps(folder, prompts, num_tokens)
                if min(min(row) for row in gaps) > 0.001:
                    break
            else:
                raise AssertionError("no seed with wide gaps")
            whole = prompts[-1] + tokens[-1]
            exact, plain = (logits_of(folder, whole, dtype) for dtype in DTYPES)
            made[name] = Case(folder, prompts, tokens, gaps, float((plain - exact).abs().max()))
        return made[name]

    return make


LLAMA3 = {"rope_theta": 500000.0, "rope_scaling": models.LLAMA3_SCALING}
SHAPES: dict[str, dict[str, Any]] = {
    "default rope": {},
    "llama3 rope": LLAMA3,
    "new rope form": {**LLAMA3, "rope_form": "new"},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "gqa 1": {"heads": 4, "kv_heads": 4},
    "gqa 3": {"heads": 6, "kv_heads": 2, "hidden": 384},
    "gqa 4": {"heads": 4, "kv_heads": 1},
    "head_dim 128": {"heads": 2, "kv_heads": 1, "head_dim": 128},
    "tied": {"tied_variant": "tied"},
    "tied copy": {"tied_variant": "tied_copy"},
    "sharded": {"num_shards": 3},
}


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_equal_transformers(device: str, case: Callable[..., Case], name: str) -> None:
    """C01, C02 a and b, C08 a: prompts of 1, 7, 65 and 200 ids, 48 tokens, alone and all at once."""
    c = case(name.replace(" ", "_"), [1, 7, 65, 200], 48, **SHAPES[name])
    llm = LLM(c.folder, device=device, prefix_cache=False)
    c.check(generate(llm, c.prompts, 48), device)
    for i, prompt in enumerate(c.prompts):
        c.check(generate(llm, [prompt], 48), device, [i])


def test_rope_scaling_matters(case: Callable[..., Case], tmp_path: Path) -> None:
    """C01: without the Llama 3 scaling the same weights give other tokens, so the test above would see it skipped."""
    c = case("llama3_rope", [1, 7, 65, 200], 48, **LLAMA3)
    for path in c.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    models.edit_json(tmp_path / "config.json", rope_scaling=None)
    assert generate(LLM(tmp_path, device="cpu"), c.prompts, 48) != c.expected


LIMITS: dict[str, dict[str, Any]] = {
    "three at once": {"max_num_seqs": 3},
    "one at once": {"max_num_seqs": 1},
    "chunks of 8": {"max_batched_tokens": 8, "max_num_seqs": 4},
    "chunks of 17": {"max_batched_tokens": 17},
    "few blocks": {"num_kv_blocks": 14, "block_size": 8},
    "few blocks, chunks": {"num_kv_blocks": 14, "block_size": 8, "max_batched_tokens": 8},
    "blocks of 1": {"block_size": 1},
    "blocks of 64": {"block_size": 64},
    "two steps ahead": {"run_ahead": 2},
    "few blocks, two steps ahead": {"num_kv_blocks": 14, "block_size": 8, "run_ahead": 2},
    "no graphs": {"graphs": False},
    "few blocks, no graphs": {"num_kv_blocks": 14, "block_size": 8, "graphs": False},
    "chunks of 8, no graphs": {"max_batched_tokens": 8, "graphs": False},
}


LENGTHS = [1, 2, 5, 9, 13, 15, 16, 17, 24, 31, 32, 33, 40, 47, 55, 60]


@pytest.mark.parametrize("name", LIMITS)
def test_limits_do_not_change_tokens(device: str, case: Callable[..., Case], name: str) -> None:
    """C05, C07 a: 16 prompts of unequal length, whatever runs beside them, and in reverse order."""
    c = case("limits", LENGTHS, 40)
    llm = LLM(c.folder, device=device, **LIMITS[name], prefix_cache=False)
    c.check(generate(llm, c.prompts, 40), device)
    backwards = list(range(len(c.prompts)))[::-1]
    c.check(generate(llm, [c.prompts[i] for i in backwards], 40), device, backwards)
    preempted = llm.engine.statistics.preemptions
    assert (preempted > 0) == ("few blocks" in name), f"{preempted} preemptions"


def test_repeats_are_equal(device: str, case: Callable[..., Case]) -> None:
    """The same job 50 times, with sampling too: every token the same."""
    c = case("limits", LENGTHS, 40)
    llm = LLM(c.folder, device=device, max_num_seqs=8, prefix_cache=False)
    for temperature in (0.0, 0.9):
        count = 50 if device == "cuda" else 3
        runs = [generate(llm, c.prompts, 12, temperature=temperature, seed=3) for _ in range(count)]
        assert all(run == runs[0] for run in runs)


def test_sampling_does_not_depend_on_neighbours(device: str, case: Callable[..., Case]) -> None:
    c = case("limits", LENGTHS, 40)
    llm = LLM(c.folder, device=device, prefix_cache=False)
    params: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": 5}
    together = generate(llm, c.prompts, 20, **params)
    alone = [generate(llm, [prompt], 20, **params)[0] for prompt in c.prompts]
    check_alike(together, alone, device)
    assert generate(llm, c.prompts, 20, **{**params, "seed": 6}) != together


def test_dead_buffers_may_be_poisoned(case: Callable[..., Case]) -> None:
    """After each stage, every byte that the plan calls dead is overwritten with NaN: the tokens stay the same."""
    c = case("limits", LENGTHS, 40)
    llm = LLM(c.folder, device="cpu", max_batched_tokens=48, num_kv_blocks=30)
    poisoned = set()

    def poison(stage: str, layer: int) -> None:
        needed = [b for b in llm.plan.buffers if b.live == ALWAYS or b.is_needed_after(stage)]
        keep = torch.zeros(llm.plan.total_bytes, dtype=torch.bool)
        for b in needed:
            keep[b.offset : b.offset + b.nbytes] = True
        llm.runner.arena[~keep] = 0xFF
        poisoned.update(b.name for b in llm.plan.buffers if b not in needed)

    llm.runner.hook = poison
    c.check(generate(llm, c.prompts, 40), "cpu")
    assert {"normed", "qkv", "attention", "projection", "gate_up", "activation", "logits"} <= poisoned
    assert any(b.alias_of for b in llm.plan.buffers)


def test_unknown_rope_type_is_refused(tmp_path: Path) -> None:
    folder = models.write_rand(tmp_path, rope_scaling={"rope_type": "foo", "factor": 2.0})
    with pytest.raises(UserError, match="foo"):
        LLM(folder, device="cpu")


def test_logits_are_as_near_as_torch(case: Callable[..., Case], device: str) -> None:
    """Logits of prefill and decode against the fp32 reference: error at most twice that of torch's own bf16 forward."""
    c = case("llama3_rope", [1, 7, 65, 200], 48, **LLAMA3)
    ids = c.prompts[2] + c.prompts[1]
    exact, plain = (logits_of(c.folder, ids, dtype) for dtype in DTYPES)
    allowed = 2 * float((plain - exact).abs().max()) if device == "cuda" else 1e-4
    llm = LLM(c.folder, device=device, prefix_cache=False)
    chunked = LLM(c.folder, device=device, max_batched_tokens=16, prefix_cache=False)
    for batch in (1, 3, 9):
        for model in (llm, chunked):
            generate(model, [ids] * batch, 1)
            error = float((model.runner.buffers["logits"][0].cpu() - exact[-1]).abs().max())
            assert error <= allowed, f"prefill, batch {batch}: error {error:.4f}, allowed {allowed:.4f}"
    for batch in (1, 3, 9, 16):  # decode: feed the model its own answer and look at the logits of each step
        params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=0)  # with them, all batches store their logits
        rows = [llm.engine.add(ids[:40], params) for _ in range(batch)]
        while llm.engine.has_work:
            llm.engine.step()
        answer = rows[0].output_token_ids
        exact_end, plain_end = (logits_of(c.folder, ids[:40] + answer[:-1], dtype)[-1] for dtype in DTYPES)
        error = float((llm.runner.buffers["logits"][0].cpu() - exact_end).abs().max())
        bound = max(allowed, 2 * float((plain_end - exact_end).abs().max()))
        assert error <= bound, f"decode, batch {batch}: error {error:.4f}, allowed {bound:.4f}"
