"""Our engine against `transformers` on the CPU: `python tests/bench_cpu.py FOLDER`, a Llama checkpoint (SmolLM2-135M).

Both compute in fp32, greedy, ignoring EOS, each in a process of its own, in turns; medians count. Decode speed is
(N - 1) / (t(N tokens) - t(1 token)) at batch 1. The job is 16 prompts of unequal length, cut from LICENSE, submitted at
once; `transformers` runs it both one by one and as a left-padded batch, and the better one counts. The tokens must be
equal to those of `transformers` one by one: the exit code is 1 when they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTHS = (1, 1, 5, 12, 18, 7, 194, 26, 22, 22, 20, 10, 16, 75, 300, 207)  # of 16 prompts such as people type and paste
DECODE_PROMPT = 48
Generate = Callable[[list[list[int]], int], list[list[int]]]


def ours(folder: Path) -> tuple[dict[str, Generate], dict[str, int]]:
    """Ways to generate, and the bytes of weights and KV cache."""
    from tinyvllm_cli.checkpoint.names import weights_layout
    from tinyvllm_cli.engine.sequence import SamplingParams
    from tinyvllm_cli.llm import LLM

    sizes = {"max_num_seqs": 16, "max_model_len": 1024, "num_kv_blocks": 1024}
    llm = LLM(folder, device="cpu", dtype="float32", prefix_cache=False, **sizes)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        sequences = [llm.engine.add(prompt, params) for prompt in prompts]
        while llm.engine.has_work:
            llm.engine.step()
        return [sequence.output_token_ids for sequence in sequences]

    _, weights = weights_layout(llm.config, 4)
    return {"engine": generate}, {"weights": weights, "KV cache": llm.kv_plan.total_bytes}


def theirs(folder: Path) -> tuple[dict[str, Generate], dict[str, int]]:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()

    @torch.inference_mode()
    def batch(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        return model.generate(ids, attention_mask=mask, generation_config=config)[:, longest:].tolist()

    def single(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        return [batch([prompt], max_tokens)[0] for prompt in prompts]

    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"batch": batch, "single": single}, {"weights": weights}


def serve(side: str, folder: Path, threads: int) -> None:
    """The worker: a JSON request a line on stdin, a JSON answer a line on stdout."""
    import torch

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    torch.set_num_threads(threads)
    start = time.perf_counter()
    ways, sizes = {"ours": ours, "transformers": theirs}[side](folder)
    print(json.dumps({"load": time.perf_counter() - start, **sizes}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        tokens = ways[request["way"]](request["prompts"], request["max_tokens"])
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "tokens": tokens, "peak": peak}), file=answers)


class Worker:
    """One side, in a process of its own."""

    def __init__(self, side: str, folder: Path, threads: int) -> None:
        command = [sys.executable, __file__, str(folder), "--threads", str(threads), "--serve", side]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.sizes = self._read()
        self.peak = 0

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker has ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, way: str, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None
        request = {"way": way, "prompts": prompts, "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self.peak = answer["peak"]
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--serve", choices=["ours", "transformers"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.folder, options.threads)
        return 0

    import tokenizers

    text = (Path(__file__).resolve().parent.parent / "LICENSE").read_text()
    ids = tokenizers.Tokenizer.from_file(str(options.folder / "tokenizer.json")).encode(" ".join(text.split())).ids
    single = ids[:DECODE_PROMPT]
    prompts = [ids[29 * i : 29 * i + length] for i, length in enumerate(LENGTHS)]
    workers = {side: Worker(side, options.folder, options.threads) for side in ("ours", "transformers")}
    decode: dict[str, list[float]] = {"ours": [], "transformers": []}
    job: dict[str, list[float]] = {"engine": [], "single": [], "batch": []}
    tokens: dict[str, list[list[int]]] = {}
    num_tokens = options.max_tokens * len(prompts)
    for repetition in range(-1, options.repetitions):  # the first one warms up
        for side, way in (("ours", "engine"), ("transformers", "single")):
            first, _ = workers[side].run(way, [single], 1)
            all_of_them, _ = workers[side].run(way, [single], options.max_tokens)
            decode[side].append((options.max_tokens - 1) / (all_of_them - first))
        for side, way in (("ours", "engine"), ("transformers", "single"), ("transformers", "batch")):
            seconds, tokens[way] = workers[side].run(way, prompts, options.max_tokens)
            job[way].append(num_tokens / seconds)
        if repetition < 0:
            for samples in (*decode.values(), *job.values()):
                samples.clear()

    print(
        f"{options.folder.name}, fp32, {options.threads} threads, median of {options.repetitions} (lowest to highest)\n"
    )
    print(f"{'':34}{'ours':>24}{'transformers':>26}{'ratio':>9}{'target':>8}")

    def row(name: str, our: list[float], their: list[float], target: float) -> None:
        mine, other = statistics.median(our), statistics.median(their)
        cells = [f"{statistics.median(x):.1f} ({min(x):.1f} to {max(x):.1f})" for x in (our, their)]
        print(f"{name:34}{cells[0]:>24}{cells[1]:>26}{mine / other:>9.2f}{target:>8.1f}")

    best = max("single", "batch", key=lambda way: statistics.median(job[way]))
    row(f"decode, batch 1, {len(single)} tokens: tok/s", decode["ours"], decode["transformers"], 1.0)
    for way, name in (("single", "one by one"), ("batch", "padded batch")):
        row(f"16 prompts, {name}: tok/s", job["engine"], job[way], 2.0 if way == best else 0.0)
    equal = sum(a == b for a, b in zip(tokens["engine"], tokens["single"], strict=True))
    print(f"\ntokens equal to those of transformers one by one: {equal} of {len(prompts)} prompts")
    for side, worker in workers.items():
        worker.close()
        parts = {name: size for name, size in worker.sizes.items() if name != "load"}
        made_of = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in parts.items())
        print(f"{side}: peak memory {worker.peak / 2**20:,.0f} MiB ({made_of}); loaded in {worker.sizes['load']:.1f} s")
    return 0 if equal == len(prompts) else 1


if __name__ == "__main__":
    sys.exit(main())
