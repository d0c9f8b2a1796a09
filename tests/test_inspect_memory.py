"""What `inspect` predicts is what LLM allocates, on the CPU and on CUDA; budgets, GPUs, and the tiny-vllm preset."""

from __future__ import annotations

import ctypes
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from json_schema import violations
from models import write_rand
from test_inspect import SCHEMA, Terminal, look

from tinyvllm_cli.bench.shapes import SHAPES
from tinyvllm_cli.commands.inspect_preset import preset
from tinyvllm_cli.engine.sequence import SamplingParams
from tinyvllm_cli.errors import UserError
from tinyvllm_cli.llm import LLM
from tinyvllm_cli.memory import gpu
from tinyvllm_cli.memory.budget import CUDA_CONTEXT, CUDA_RESERVE, Device, plan_memory
from tinyvllm_cli.memory.plan import default_limits, plan_buffers
from tinyvllm_cli.render.console import Console
from tinyvllm_cli.render.inspect_memory import bar, show_preset

GIB = 2**30


def test_predicted_is_what_is_allocated(tmp_path: Path, device: str) -> None:
    """To the byte what LLM asks torch for; on CUDA within 3% of the peak that torch reserves, graphs included."""
    cache = 2 * GIB if device == "cuda" else 2**24
    folder = write_rand(tmp_path / "m", dtype="bfloat16", layers=8, max_position=16384)
    options: dict[str, Any] = {"device": device, "kv_cache_memory": cache}
    predicted = look(folder, **options)[0].plan
    assert predicted is not None
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved() if device == "cuda" else 0
    llm = LLM(folder, **options)
    for length in (3, 70, 500):
        llm.engine.add([7] * length, SamplingParams(max_tokens=8, ignore_eos=True))
    while llm.engine.has_work:
        llm.engine.step()
    runner = llm.runner
    assert (llm.dtype, llm.limits, llm.kv_plan) == (predicted.dtype, predicted.limits, predicted.kv)
    assert predicted.buffers.total_bytes == runner.arena.nbytes
    assert predicted.kv is not None
    assert predicted.kv.total_bytes == runner.kv_cache.nbytes
    weights = runner.model.weights.arena.nbytes
    assert predicted.weights_bytes == weights
    assert predicted.allocated_bytes == weights + runner.arena.nbytes + runner.kv_cache.nbytes
    if device == "cuda":
        peak = torch.cuda.max_memory_reserved() - before
        assert abs(peak - predicted.allocated_bytes) < 0.03 * peak


def test_memory_of_a_gpu_is_shared_out(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", max_position=4096)
    small = {"device": "auto", "max_num_seqs": 8, "max_batched_tokens": 64}
    plan = look(folder, memory=8 * GIB, **small)[0].plan
    assert plan is not None
    assert plan.kv is not None
    assert (plan.dtype, plan.device.cuda) == ("bfloat16", True)
    assert (plan.kv.num_blocks, plan.full_length_seqs, plan.largest_context) == (8 * 256, 8, 4096)
    block = plan.kv.block_bytes
    assert block == 16 * 3 * 2 * 2 * 64 * 2
    fixed = plan.weights_bytes + plan.buffers.total_bytes + CUDA_CONTEXT + CUDA_RESERVE
    memory = int((fixed + 300 * block + 100) / 0.9) + 1
    result, out, _ = look(folder, memory=memory, **small)
    assert result.plan is not None
    assert result.plan.kv is not None
    assert result.plan.kv.num_blocks == 300
    assert "1 sequences of 4,096 tokens, of 8 asked for" in " ".join(out.split())
    memory = int((fixed + 100 * block) / 0.9)
    result, out, err = look(folder, memory=memory, **small)
    assert result.plan is not None
    assert result.exit_code == 0
    longest = result.plan.largest_context
    assert 1600 <= longest < 2800  # shorter sequences need smaller tables, which leaves room for more blocks
    assert f"the longest that does has {longest:,} (--max-model-len)" in err
    exact, more = (look(folder, memory=memory, **small, max_model_len=n)[0].plan for n in (longest, longest + 1))
    assert exact is not None
    assert more is not None
    assert (exact.full_length_seqs, more.full_length_seqs) == (1, 0)


def test_no_room(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m")
    result, out, err = look(folder, memory=1000)
    assert result.plan is not None
    assert (result.plan.kv, result.plan.largest_context, result.plan.full_length_seqs) == (None, 0, 0)
    assert "no memory for the KV cache" in err
    assert "no room" in out
    assert json.loads(look(folder, "json", memory=1000)[1])["kv_cache"] is None


def test_wrong_options(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m")
    with pytest.raises(UserError, match="more than the 512"):
        look(folder, max_model_len=513)
    with pytest.raises(UserError, match="out of range"):
        look(folder, memory_fraction=0.0)
    with pytest.raises(UserError, match="smaller than --max-num-seqs"):
        look(folder, max_num_seqs=9, max_batched_tokens=8)


def test_limits_beyond_all_measure(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m")
    assert "no memory for the KV cache" in look(folder, device="auto", max_num_seqs=10**9, memory=2**40)[2]  # at once
    for name in ("max_num_seqs", "max_batched_tokens", "block_size"):
        with pytest.raises(UserError, match="out of range"):
            look(folder, **{name: 2**31})


def test_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = write_rand(tmp_path / "m", heads=8, kv_heads=4)  # head_dim 32
    result, out, err = look(odd, device="cuda")
    assert result.runs_on == {"cpu": True, "cuda": False}
    assert "tinyvllm cannot run this model: head_dim 32 is not supported by the CUDA kernels" in err
    assert "on the CPU" in out
    assert result.exit_code == 0
    card = Device("NVIDIA H200", True, 140 * GIB, 139 * GIB)
    monkeypatch.setattr("tinyvllm_cli.commands.inspect.find_gpu", lambda visible: card)
    result, out, err = look(odd, device="auto")
    assert result.plan is not None
    assert not result.plan.device.cuda
    assert "planned for the CPU, because CUDA cannot be used: head_dim 32" in err
    result, out, _ = look(write_rand(tmp_path / "n"), device="auto")
    assert result.plan is not None
    assert result.plan.device == card
    assert "Memory of NVIDIA H200, 140.00 GiB, 139.00 GiB of it free" in out
    result, _, err = look(write_rand(tmp_path / "n"), device="auto", dtype="float32")
    assert result.plan is not None
    assert (result.plan.dtype, result.plan.device.cuda) == ("float32", False)


def test_a_card_that_is_full_to_its_fraction() -> None:
    """Llama 3.2 1B on an H200: cache, reserve and what is left alone add up to the card."""
    config = SHAPES["Llama-3.2-1B"]
    card = Device("H200", True, 140 * GIB, 139 * GIB)
    plan = plan_memory(config, default_limits(config, True), "bfloat16", card, 2_471_628_800)
    assert plan.kv is not None
    assert plan.kv_bytes_per_token == 32 * 1024
    used = plan.allocated_bytes + plan.context_bytes + plan.reserve_bytes + GIB
    assert 0 <= 0.9 * 140 * GIB - used < plan.kv.block_bytes
    assert plan.largest_context == 131072


# --- GPUs ------------------------------------------------------------------------------------------------------------


class FakeDriver:
    """Two cards, as NVML would tell of them; `fails`: names of functions that return an error or are missing."""

    def __init__(self, fails: str = "", lacks: str = "") -> None:
        self.fails, self.lacks, self.calls = fails, lacks, []

    def __getattr__(self, name: str) -> Any:
        if name == self.lacks:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "nvmlDeviceGetHandleByIndex_v2":
                arguments[1]._obj.value = arguments[0].value + 1
                return int(arguments[0].value > 1)
            if name == "nvmlDeviceGetHandleByUUID":
                arguments[1]._obj.value = 2
                return int(arguments[0] != b"GPU-two")
            if name == "nvmlDeviceGetName":
                arguments[1].value = b"Card %d" % arguments[0].value
            if name == "nvmlDeviceGetMemoryInfo_v2":
                memory = arguments[1]._obj
                assert memory.version == 0x2000028
                memory.total, memory.reserved, memory.free = 141 * GIB, GIB, 100 * GIB * arguments[0].value
            return int(name == self.fails)

        return call


@pytest.mark.parametrize(
    ("visible", "name"),
    [(None, "Card 1"), ("0", "Card 1"), ("1,0", "Card 2"), ("GPU-two", "Card 2"), ("GPU-x", None), ("7", None),
     ("", None), ("-1", None)],
)  # fmt: skip
def test_the_gpu_that_cuda_would_take(monkeypatch: pytest.MonkeyPatch, visible: str | None, name: str | None) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda library: FakeDriver())
    found = gpu.find_gpu(visible, "fake")
    assert (found.name if found else None) == name
    if name == "Card 1":
        assert found == Device("Card 1", True, 140 * GIB, 100 * GIB)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.find_gpu(None, "libthat-does-not-exist.so") is None
    for fake in (
        FakeDriver(fails="nvmlInit_v2"),
        FakeDriver(fails="nvmlDeviceGetName"),
        FakeDriver(fails="nvmlDeviceGetMemoryInfo_v2"),
        FakeDriver(lacks="nvmlDeviceGetMemoryInfo_v2"),
    ):
        monkeypatch.setattr(ctypes, "CDLL", lambda library, fake=fake: fake)
        assert gpu.find_gpu(None, "fake") is None
        assert ("nvmlShutdown" in fake.calls) == (fake.fails != "nvmlInit_v2")


# --- tiny-vllm -------------------------------------------------------------------------------------------------------

KIB, MIB = 1024, 2**20
TINY_VLLM = {
    "gpu_input_tokens": 2 * KIB, "input_embeddings": 2 * MIB, "hidden_state": 2 * MIB, "rms_norms": 2 * MIB,
    "buf_2048_1": 2 * MIB, "k_proj_temp_buf": 512 * KIB, "v_proj_temp_buf": 512 * KIB,
    "prefill_attn_scores": 16 * MIB, "buf_2048_2": 2 * MIB, "gate": 8 * MIB, "up": 8 * MIB,
    "embed_proj": 125 * MIB + 256 * KIB, "embed_proj_cpu": 125 * MIB + 256 * KIB, "gpu_last_tokens": 8,
    "k_proj_batched_buffer": 2 * KIB, "v_proj_batched_buffer": 2 * KIB,
}  # fmt: skip


def test_the_preset_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    result = preset()
    assert {buffer.name: buffer.nbytes for buffer in result.buffers} == TINY_VLLM
    assert {buffer.name for buffer in result.buffers if len(buffer.roles) > 1} == {"buf_2048_1", "buf_2048_2"}
    assert result.kv_cache_bytes // result.kv_block_bytes == 65536
    assert not violations(result.to_json(), SCHEMA, SCHEMA)
    ours = plan_buffers(SHAPES["Llama-3.2-1B"], result.ours.limits, "bfloat16")
    assert result.ours.buffers == ours
    assert ours.total_bytes < 0.205 * result.device_bytes
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    show_preset(result, Console(out=out))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for name, nbytes in TINY_VLLM.items():
        assert any(line.startswith(f"{name} ") and f" {nbytes:,} " in line for line in lines), name
    for buffer in ours.buffers:
        assert any(line.startswith(f"{buffer.name} ") and f" {buffer.nbytes:,} " in line for line in lines)
    plain = io.StringIO()
    show_preset(result, Console("json", out=plain))
    assert json.loads(plain.getvalue())["preset"] == "tiny-vllm"


def test_bars() -> None:
    segments = [("a", 50, "", "a"), ("b", 49, "", "b"), ("nothing", 0, "", "n"), ("little", 1, "", "c")]
    assert bar(segments, 10) == "aaaabbbbbc"
    assert bar([("a", 0, "", "a")], 5) == "aaaaa"
    assert len(bar([(str(i), 1, "", str(i)) for i in range(7)], 80)) == 80
