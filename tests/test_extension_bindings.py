"""bindings.cpp on the CPU: compiled against launchers that record what they are given, and stubs of the CUDA headers.

So order and meaning of every argument between schema and launcher, and every refusal, are tested without a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from op_calls import BF16, BS, F32, INTER, WORKSPACE_FLOATS, B, K, N, T, calls, new

from cuda_ext import build, toolchain
from cuda_ext.cache import load_or_build
from tinyvllm_cli import ops

BINDINGS = toolchain.SOURCE_FOLDER / "bindings.cpp"
CALL_H = toolchain.SOURCE_FOLDER / "call.h"
DECODE_STEP_OP_H = toolchain.SOURCE_FOLDER / "decode_step_op.h"
LINEAR_OP_H = toolchain.SOURCE_FOLDER / "linear_op.h"
LAUNCH_H = toolchain.SOURCE_FOLDER / "launch.h"
STUBS = {
    "cuda_runtime_api.h": """
        #pragma once
        enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNoDevice = 100 };
        typedef struct CUstream_st* cudaStream_t;
        inline const char* cudaGetErrorString(cudaError_t) { return "what went wrong"; }
        inline const char* cudaGetErrorName(cudaError_t error) {
          return error == cudaErrorInvalidValue ? "cudaErrorInvalidValue" : "cudaErrorNoDevice";
        }
    """,
    "c10/cuda/CUDAGuard.h": """
        #pragma once
        #include <c10/core/Device.h>
        namespace c10::cuda { struct CUDAGuard { explicit CUDAGuard(c10::Device) {} }; }
    """,
    "c10/cuda/CUDAStream.h": """
        #pragma once
        #include <cuda_runtime_api.h>
        namespace c10::cuda { inline cudaStream_t getCurrentCUDAStream(int) { return (cudaStream_t)0x5000; } }
    """,
}
SHIM = """
    #include <ATen/core/Tensor.h>
    #include <torch/library.h>
    #include <cstdio>
    #include "launch.h"
    static std::string record;
    static cudaError_t result = cudaSuccess;
    static void note(const char* name, const void* p) {
      record += name + ("=" + std::to_string((size_t)p)) + ";";
    }
    static void note(const char* name, double v) {  // no stream: see call.h
      char number[32];
      std::snprintf(number, sizeof number, "%.17g", v);
      record += name + ("=" + std::string(number)) + ";";
    }
    static void note(const char* name, tinyvllm::Dtype v) { note(name, (double)v); }
    static void note(const char*, const tinyvllm::LlamaWeights& w) {
      note("embed", w.embed); note("final_norm", w.final_norm); note("lm_head", w.lm_head);
      for (int i = 0; i < 12; ++i) note(("layer_" + std::to_string(i)).c_str(), w.layers[i]);
    }
    static void note(const char*, const tinyvllm::LlamaShape& s) {
      note("num_layers", (double)s.num_layers); note("hidden_size", (double)s.hidden_size);
      note("intermediate_size", (double)s.intermediate_size); note("vocab_size", (double)s.vocab_size);
      note("num_heads", (double)s.num_heads); note("num_kv_heads", (double)s.num_kv_heads);
      note("head_dim", (double)s.head_dim);
    }
    extern "C" const char* last_launch() { return record.c_str(); }
    extern "C" void reset(int error) { record.clear(); result = (cudaError_t)error; }
    LAUNCHERS
    int tinyvllm::sample_workspace_floats() { return FLOATS; }
    #undef TORCH_LIBRARY_IMPL
    #define TORCH_LIBRARY_IMPL(ns, key, m) _TORCH_LIBRARY_IMPL(tinyvllm_bindings, CPU, m, C10_UID)
    #define is_cuda is_cpu
    #include "bindings.cpp"
"""


def declarations() -> dict[str, list[tuple[str, str]]]:
    """Type and name of each parameter of each launcher in launch.h."""
    found = {}
    for name, parameters in re.findall(r"^cudaError_t (\w+)\(([^;]*)\);", LAUNCH_H.read_text(), re.MULTILINE):
        pairs = [re.fullmatch(r"(.*\W)(\w+)", part.strip()) for part in parameters.split(",")]
        found[name] = [(pair[1].strip(), pair[2]) for pair in pairs if pair]
    return found


def shim_source() -> str:
    launchers = ""
    for name, parameters in declarations().items():
        signature = ", ".join(f"{kind} {parameter}" for kind, parameter in parameters)
        notes = " ".join(f'note("{parameter}", {parameter});' for _, parameter in parameters)
        launchers += f'cudaError_t tinyvllm::{name}({signature}) {{ record = "{name};"; {notes} return result; }}\n'
    text = "\n".join(line.strip() for line in SHIM.splitlines())
    return text.replace("LAUNCHERS", launchers).replace("FLOATS", str(WORKSPACE_FLOATS))


@pytest.fixture(scope="module")
def recorder() -> Any:
    """The library; kept in build/ while neither bindings.cpp, launch.h, torch nor this file change."""
    digest = hashlib.sha256()
    for text in (
        BINDINGS.read_text(),
        CALL_H.read_text(),
        DECODE_STEP_OP_H.read_text(),
        LINEAR_OP_H.read_text(),
        LAUNCH_H.read_text(),
        Path(__file__).read_text(),
        torch.__version__,
    ):
        digest.update(text.encode())
    name = f"bindings_{digest.hexdigest()[:16]}"
    library = toolchain.SOURCE_FOLDER.parent / "build" / "tests" / f"{name}.so"

    def compile_shim(folder: Path) -> Path:
        for path, text in STUBS.items():
            (folder / "stubs" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "stubs" / path).write_text("\n".join(line.strip() for line in text.splitlines()))
        (folder / "shim.cpp").write_text(shim_source())
        flags = ["-O0", f"-I{folder / 'stubs'}", f"-I{toolchain.SOURCE_FOLDER}"]
        return build.build_library(name, [folder / "shim.cpp"], flags, [], folder, toolchain.find_ninja())

    definitions = torch.library.Library("tinyvllm_bindings", "DEF")
    for op, schema in ops.SCHEMAS.items():
        definitions.define(op + schema)
    load_or_build(library, compile_shim, print)
    loaded = ctypes.CDLL(str(library))
    loaded.last_launch.restype = ctypes.c_char_p
    yield loaded
    definitions._destroy()


def run(recorder: Any, op: str, arguments: dict[str, Any], error: int = 0) -> dict[str, float]:
    """Calls the op; returns what its launcher was given, empty when it was not called."""
    recorder.reset(error)
    getattr(torch.ops.tinyvllm_bindings, op)(**arguments)
    launched = recorder.last_launch().decode()
    if not launched:
        return {}
    name, *pairs = launched.rstrip(";").split(";")
    assert name == op
    return {key: float(value) for key, value in (pair.split("=") for pair in pairs)}


@pytest.mark.parametrize("act", [torch.float16, BF16])
@pytest.mark.parametrize("op", ops.SCHEMAS)
def test_launcher_gets_each_argument(recorder: Any, op: str, act: torch.dtype) -> None:
    arguments, sizes = calls(act)[op]
    pointers = {name: value.data_ptr() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    assert run(recorder, op, arguments) == {**pointers, **sizes, "stream": 0x5000}


def strided(t: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


def misaligned(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)


def other_dtype(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.float64)


def deeper(t: torch.Tensor) -> torch.Tensor:
    return t.unsqueeze(0)


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    f.__name__: f for f in (strided, misaligned, other_dtype, deeper)
}
TENSORS = [
    (op, name) for op, call in calls().items() for name, value in call[0].items() if isinstance(value, torch.Tensor)
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_faulty_tensor_is_refused_by_name(recorder: Any, op: str, name: str, fault: str) -> None:
    arguments, _ = calls()[op]
    scratch = name in {"workspace", "counters", "ranks", "parts", "sums", "other_sums"}
    if fault == "deeper" and scratch:
        assert run(recorder, op, {**arguments, name: deeper(arguments[name])})
        return
    with pytest.raises(RuntimeError, match=rf"^{op}: .*{name if fault != 'other_dtype' else ''}"):
        run(recorder, op, {**arguments, name: FAULTS[fault](arguments[name])})
    assert recorder.last_launch() == b""


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_short_tensor_is_refused(recorder: Any, op: str, name: str) -> None:
    """One row less than the other tensors say; only tables whose length is their own may be of any length."""
    arguments, _ = calls()[op]
    arguments[name] = arguments[name][:-1].contiguous() if name != "q" else arguments[name][:-1]
    free = {("embedding", "weight"), ("decode_inputs", "last_tokens"), ("decode_step", "times")}
    free |= {(name, "rope_table") for name in ("rope_store", "attention_decode", "decode_step")}
    free |= {(name, "kv_cache") for name in ("rope_store", "attention_decode", "attention_prefill")}
    free |= {(name, "block_table") for name in ("attention_decode", "attention_prefill")}
    free |= {("count_tokens", "counts"), ("logprobs", "num_logprobs")}
    free |= {("argmax_linear_hopper", "weight"), ("argmax_linear_hopper", "last_tokens")}
    if (op, name) in free:
        assert run(recorder, op, arguments)
        return
    with pytest.raises(RuntimeError, match=f"^{op}: "):
        run(recorder, op, arguments)


@pytest.mark.parametrize("op", ["rope_store", "attention_decode", "attention_prefill"])
def test_head_dim_is_refused_by_name(recorder: Any, op: str) -> None:
    arguments, _ = calls()[op]
    arguments["kv_cache"] = new(B, K, 2, BS, 96, dtype=BF16)
    with pytest.raises(RuntimeError, match=f"{op}: head_dim of kv_cache must be 64 or 128, got 96"):
        run(recorder, op, arguments)


def test_float32_activations_are_refused(recorder: Any) -> None:
    arguments = {name: new(T, INTER, dtype=F32) for name in ("out", "gate_up")}
    with pytest.raises(RuntimeError, match="silu_mul: gate_up is Float, expected BFloat16 or Half"):
        run(recorder, "silu_mul", arguments)


def test_matvec_writes_float32_logits(recorder: Any) -> None:
    arguments, _ = calls()["matvec"]
    arguments["out"] = new(T, N, dtype=F32)
    assert run(recorder, "matvec", arguments)["out_dtype"] == 0


def test_nothing_to_do_launches_nothing(recorder: Any) -> None:
    arguments = {"out": new(0, INTER, dtype=BF16), "gate_up": new(0, 2 * INTER, dtype=BF16)}
    assert run(recorder, "silu_mul", arguments) == {}


@pytest.mark.parametrize(("error", "message"), [(1, "does not support these sizes"), (100, "cudaErrorNoDevice")])
@pytest.mark.parametrize("op", ops.SCHEMAS)
def test_launch_error_names_the_op(recorder: Any, op: str, error: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^{op}: what went wrong .*{message}"):
        run(recorder, op, calls()[op][0], error)


def test_both_sides_name_the_same_ops() -> None:
    bound = re.findall(r'm\.impl\("(\w+)", tinyvllm::(\w+)_op\)', BINDINGS.read_text())
    assert [name for name, _ in bound] == [function for _, function in bound] == list(ops.SCHEMAS)
    assert list(declarations()) == list(ops.SCHEMAS)
