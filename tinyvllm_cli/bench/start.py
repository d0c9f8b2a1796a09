"""What a user waits for before the first token: processes that start, headers and weights that are read.

Checkpoints are made for it in a temporary folder: headers with holes behind them for `inspect`, and for what reads
weights a real file of the measured shape, with the demo's tokenizer.
"""

from __future__ import annotations

import json
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.random import default_rng  # numpy loads it late, and swallows a Ctrl-C meanwhile

from tinyvllm_cli.bench.compare import hf_config
from tinyvllm_cli.bench.result import Result, empty_result
from tinyvllm_cli.bench.shapes import SHAPES
from tinyvllm_cli.bench.workloads import Case
from tinyvllm_cli.checkpoint.config import ModelConfig
from tinyvllm_cli.checkpoint.names import stored_weights
from tinyvllm_cli.errors import UserError

LARGE = replace(
    SHAPES["Llama-3.1-8B"], hidden_size=8192, num_layers=80, num_heads=64, head_dim=128, intermediate_size=28672
)
"""The shape of Llama-3.1-70B: 141 GB in bf16."""
SHARD_BYTES = 5 * 10**9
CHUNK_BYTES = 64 * 2**20
SECONDS = 120
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
EXTENSION = (
    "import time, torch; torch.cuda.init(); from cuda_ext.build import load_extension; "
    "began = time.perf_counter(); load_extension(); print(time.perf_counter() - began)"
)


def measure_start(
    case: Case, model: Path | ModelConfig, device: str, dtype: str, repetitions: int, budget_s: float = float("inf")
) -> Result:
    """Samples of the start that the case names, after one to warm the page cache. UserError when it fails.

    As many as `repetitions`; fewer, but at least one, once `budget_s` seconds are spent.
    """
    result = empty_result(case)
    folder = Path(tempfile.gettempdir(), f"tinyvllm-bench-{secrets.token_hex(8)}")
    try:  # a TemporaryDirectory would leave the folder behind if it were interrupted while it is made
        folder.mkdir(mode=0o700)
        sample = _sampler(case.name, model, folder, device, dtype)
        spent = sample()
        while len(result.samples) < repetitions and (spent < budget_s or not result.samples):
            result.samples.append(sample())
            spent += result.samples[-1]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result.ms, result.steps = 1e3 * statistics.median(result.samples), 1
    return result


def _sampler(name: str, model: Path | ModelConfig, folder: Path, device: str, dtype: str) -> Callable[[], float]:
    if name == "--help":
        return lambda: _process("-m", "tinyvllm_cli", "--help")[0]
    if name == "inspect of 141 GB":
        write_checkpoint(folder, LARGE, holes=True)
        return lambda: _process("-m", "tinyvllm_cli", "inspect", str(folder), "--json")[0]
    if name == "extension is built":
        if device != "cuda":
            raise UserError("there is no extension on the CPU")
        return lambda: float(_process("-c", EXTENSION)[1])
    path = model if isinstance(model, Path) else write_checkpoint(folder, model)
    if name == "weights to device":
        return lambda: _load(path, device, dtype)
    arguments = ("--model", str(path), "--device", device, "--dtype", dtype, "--raw", "--ignore-eos", "--json")
    return lambda: _process("-m", "tinyvllm_cli", "generate", *arguments, "--max-tokens", "1", "Hello")[0]


def _process(*arguments: str) -> tuple[float, str]:
    """Seconds from the start of a Python process to its end, and what it has printed."""
    began = time.perf_counter()
    try:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"python {' '.join(arguments[:3])} has taken more than {SECONDS} s") from error
    seconds = time.perf_counter() - began
    if done.returncode:
        raise UserError(f"python {' '.join(arguments[:3])} has failed: {done.stderr.strip()[-300:]}")
    return seconds, done.stdout


def _load(folder: Path, device: str, dtype: str) -> float:
    """Seconds to read a checkpoint's weights into one arena on the device."""
    import torch

    from tinyvllm_cli.checkpoint.config import read_config
    from tinyvllm_cli.checkpoint.index import open_checkpoint
    from tinyvllm_cli.checkpoint.names import map_weights
    from tinyvllm_cli.checkpoint.weights import load_weights

    began = time.perf_counter()
    config = read_config(folder)
    weight_map = map_weights(config, open_checkpoint(folder))
    weights = load_weights(config, weight_map, dtype=getattr(torch, dtype), device=torch.device(device))
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    del weights
    return seconds


def write_checkpoint(folder: Path, config: ModelConfig, *, holes: bool = False) -> Path:
    """Writes a bf16 checkpoint in shards of at most 5 GB: random numbers that repeat, or holes that take no space."""
    chunk = b"" if holes else _noise(CHUNK_BYTES)
    shards: list[dict[str, dict[str, object]]] = [{}]
    sizes = [0]
    for _, parts in stored_weights(config, config.tie_word_embeddings):
        for name, shape in parts:
            nbytes = 2 * int(np.prod(shape))
            if sizes[-1] and sizes[-1] + nbytes > SHARD_BYTES:
                shards.append({})
                sizes.append(0)
            shards[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [sizes[-1], sizes[-1] + nbytes]}
            sizes[-1] += nbytes
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard, size in zip(names, shards, sizes, strict=True):
        header = json.dumps(shard).encode()
        header += b" " * (-len(header) % 8)
        with open(folder / name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            if holes:
                file.truncate(8 + len(header) + size)
            else:
                for begin in range(0, size, CHUNK_BYTES):
                    file.write(chunk[: min(CHUNK_BYTES, size - begin)])
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    for name in TOKENIZER_FILES:
        shutil.copy(Path(__file__).parent.parent / "demo" / name, folder)
    return folder


def _noise(nbytes: int) -> bytes:
    noise = default_rng(0).standard_normal(nbytes // 2, dtype=np.float32) * np.float32(0.02)
    return (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()
