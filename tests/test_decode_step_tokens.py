"""1,000 greedy tokens of whole models by the fused decode step against those of the single ops, through the engine.

The two may part only where the single ops' two best tokens are closer than twice the largest difference of a best or
second-best token's log-probability where they agree; from there on both continue with the single ops' token. The mean
of these differences tells a wrong kernel from rounding: single tokens of the demo differ by 2 between bf16 and fp32.
`python tests/test_decode_step_tokens.py FOLDER [TOKENS]` checks any checkpoint, batch 1 to 8.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tinyvllm_cli.bench.shapes import SHAPES
from tinyvllm_cli.checkpoint.config import ModelConfig
from tinyvllm_cli.engine.sequence import SamplingParams, TokenLogprobs
from tinyvllm_cli.llm import LLM
from tinyvllm_cli.model import runner

ALWAYS = dict.fromkeys(range(1, 9), 1 << 30)
MOST_NOISE = 0.1
"""More mean difference of log-probabilities than rounding to bfloat16 explains; on the CPU it comes to 0.02."""
SHARPER = 4
"""Times so much the logits of random weights differ clearly."""
Answer = tuple[list[int], list[TokenLogprobs]]


def answers(llm: LLM, prompts: list[list[int]], counts: list[int], fused: bool) -> list[Answer]:
    """Of so many tokens each, all prompts at once, with the two best tokens of each step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "FUSED_CONTEXTS", ALWAYS if fused else {})
        rows = [
            llm.engine.add(prompt, SamplingParams(max_tokens=count, ignore_eos=True, logprobs=2))
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        while llm.engine.has_work:
            llm.engine.step()
    return [(row.output_token_ids, row.output_logprobs) for row in rows]


def check_tokens(model: str | ModelConfig, batches: tuple[int, ...], num_tokens: int) -> str:
    """Says how often the two part, and how far apart their log-probabilities are."""
    llm = LLM(model, device="cuda", dtype="bfloat16", max_num_seqs=8, num_kv_blocks=1024, prefix_cache=False)
    assert llm.runner.can_fuse
    if isinstance(model, ModelConfig):
        llm.runner.model.weights.embed.mul_(SHARPER)
    told = []
    for batch in batches:
        generator = torch.Generator().manual_seed(batch)
        vocab = min(llm.config.vocab_size, 1000)
        prompts = [torch.randint(0, vocab, (1 + 3 * i,), generator=generator).tolist() for i in range(batch)]
        expected = answers(llm, prompts, [num_tokens] * batch, fused=False)
        started, noises, partings = [0] * batch, [], []
        while unfinished := [i for i in range(batch) if started[i] < num_tokens]:
            again = [prompts[i] + expected[i][0][: started[i]] for i in unfinished]
            found = answers(llm, again, [num_tokens - started[i] for i in unfinished], fused=True)
            for i, (tokens, best) in zip(unfinished, found, strict=True):
                truth, truth_best = (part[started[i] :] for part in expected[i])
                same = next((k for k in range(len(truth)) if tokens[k] != truth[k]), len(truth))
                for ours, theirs in zip(best[:same], truth_best[:same], strict=True):
                    known = dict(zip(theirs.token_ids, theirs.values, strict=True))
                    pairs = zip(ours.token_ids, ours.values, strict=True)
                    noises += [abs(value - known[t]) for t, value in pairs if t in known]
                if same < len(truth):
                    partings.append((truth_best[same].values[1] - truth_best[same].values[2], i, started[i] + same))
                started[i] += same + 1
        mean, noise = sum(noises) / len(noises), max(noises)
        assert mean < MOST_NOISE, f"batch {batch}: mean noise {mean:.4f}, largest {noise:.4f}"
        gap, row, step = max(partings, default=(0.0, 0, 0))
        assert gap <= 2 * noise, f"batch {batch}: row {row} parts at step {step}, gap {gap:.4f}, noise {noise:.4f}"
        told.append(f"batch {batch}: {len(partings)} part, gap {gap:.4f}, noise {noise:.4f}, on average {mean:.4f}")
    return "\n".join(told)


@pytest.mark.parametrize(("model", "batches"), [("demo", (1, 2, 5, 8)), ("SmolLM2-135M", (1, 8))])
def test_a_thousand_tokens(device: str, model: str, batches: tuple[int, ...]) -> None:
    if device == "cpu":
        pytest.skip("the runner takes the fused step on CUDA only")
    check_tokens(SHAPES.get(model, model), batches, 1000)


def test_two_processes_share_the_card(device: str) -> None:
    if device == "cpu":
        pytest.skip("the runner takes the fused step on CUDA only")
    programs = [
        subprocess.Popen([sys.executable, __file__, "demo", "300"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    told = [program.communicate(timeout=100)[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0], told


if __name__ == "__main__":
    from cuda_ext.build import load_extension

    load_extension()
    print(check_tokens(sys.argv[1], tuple(range(1, 9)), int(sys.argv[2]) if len(sys.argv) > 2 else 1000))
