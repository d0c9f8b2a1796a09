"""A peer at work, in a process of its own: a JSON request on stdin, for each case a JSON answer on stdout.

Imports of the peers are made by name: they are no dependency of this package.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BAD_SAMPLES = 10
Generate = Callable[[list[list[int]], list[int], float], int]
"""Prompts, tokens wanted for each, temperature; the number of tokens that came back."""


def transformers(request: dict[str, Any], static: bool) -> tuple[Generate, str]:
    """`generate` with the default (dynamic) or a static cache, which is compiled on CUDA."""
    import torch

    package: Any = importlib.import_module("transformers")
    dtype, device = getattr(torch, request["dtype"]), request["device"]
    torch.manual_seed(request["seed"])
    if request["model"] is not None:
        model = package.AutoModelForCausalLM.from_pretrained(request["model"], dtype=dtype).to(device)
    else:
        with torch.device(device):
            model = package.AutoModelForCausalLM.from_config(package.LlamaConfig(**request["config"]), dtype=dtype)
    model = model.eval()
    model.generation_config = package.GenerationConfig()
    options: dict[str, Any] = {"cache_implementation": "static"} if static else {}

    @torch.inference_mode()
    def generate(prompts: list[list[int]], wanted: list[int], temperature: float) -> int:
        ids = torch.tensor(prompts, device=device)
        config = package.GenerationConfig(
            max_new_tokens=wanted[0], min_new_tokens=wanted[0], do_sample=False, pad_token_id=0, **options
        )
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return int(output[:, ids.size(1) :].cpu().numel())  # the copy waits for the device

    return (
        generate,
        f"generate, {'static' if static else 'dynamic'} cache, attention {model.config._attn_implementation}",
    )


def vllm(request: dict[str, Any], _: bool) -> tuple[Generate, str]:
    """vLLM's offline engine with CUDA graphs and its defaults, but the prefix cache."""
    package: Any = importlib.import_module("vllm")
    folder, options = request["model"], {}
    if folder is None:
        folder = tempfile.mkdtemp()
        Path(folder, "config.json").write_text(json.dumps(request["config"]))
        options = {"load_format": "dummy"}
    llm = package.LLM(
        folder,
        dtype=request["dtype"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=request["max_model_len"],
        max_num_seqs=request["max_num_seqs"],
        seed=request["seed"],
        **options,
    )

    def generate(prompts: list[list[int]], wanted: list[int], temperature: float) -> int:
        params = [
            package.SamplingParams(max_tokens=n, temperature=temperature, ignore_eos=True, detokenize=False)
            for n in wanted
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate, "LLM.generate, prefix cache off"


def measure(
    case: dict[str, Any], request: dict[str, Any], generate: Generate, rng: np.random.Generator
) -> dict[str, Any]:
    """Samples in seconds as `Meter` takes them, and the number of tokens of one run."""
    vocab = request["config"]["vocab_size"]

    def run(lengths: list[int], wanted: list[int]) -> tuple[float, int]:
        limit = min(case["max_id"] or vocab, vocab)
        prompts = [rng.integers(limit, size=length).tolist() for length in lengths]
        began = time.perf_counter()
        count = generate(prompts, wanted, case["temperature"])
        return time.perf_counter() - began, count

    swapped = False  # whether the longer of two runs comes first, see `Meter`

    def sample() -> tuple[float, int]:
        nonlocal swapped
        if case["test"] == "workload":
            return run(*map(list, zip(*case["requests"], strict=True)))
        lengths, ones = [case["context"]] * case["batch"], [1] * case["batch"]
        if case["test"] == "prefill":
            return run(lengths, ones)
        wanted = (ones, [case["generated_tokens"] + 1] * case["batch"])
        runs = [run(lengths, tokens) for tokens in (wanted[::-1] if swapped else wanted)]
        (first, _), (seconds, count) = runs[::-1] if swapped else runs
        swapped = not swapped
        return seconds - first, count

    if request["warmup"]:
        for _ in range(2 if case["test"] == "decode" else 1):
            sample()
    elif case["test"] == "decode":  # a difference of two runs: what the first one pays must not count
        run([case["context"]] * case["batch"], [1] * case["batch"])
    samples: list[float] = []
    count, bad = 0, 0
    while len(samples) < request["repetitions"]:
        seconds, count = sample()
        if seconds > 0:
            samples.append(seconds)
        else:  # a difference of two times that are nearly equal
            bad += 1
            if bad == BAD_SAMPLES:
                raise ValueError("the time of the decode steps is lost in the noise")
    return {"samples": samples, "output_tokens": count}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    name, request = sys.argv[1], json.load(sys.stdin)
    make = vllm if name == "vllm" else transformers
    generate, how = make(request, name.endswith("-static"))
    rng = np.random.default_rng(request["seed"])
    for case in request["cases"]:
        try:
            answer = measure(case, request, generate, rng) | {"how": how}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
