"""Session: where and on what model the cases run, and the engine that is sized for them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.bench.measure import Meter
from tinyvllm_cli.bench.result import Result, empty_result
from tinyvllm_cli.bench.start import measure_start
from tinyvllm_cli.bench.traffic import Ceiling
from tinyvllm_cli.bench.workloads import Case
from tinyvllm_cli.checkpoint.config import ModelConfig, read_config
from tinyvllm_cli.errors import UserError

if TYPE_CHECKING:
    import torch

    from tinyvllm_cli.llm import LLM

Say = Callable[[str], None]


def choose_device(wanted: str, say: Say, warn: Say) -> str:
    """ "cuda" or "cpu": CUDA when it is there and the kernels can be had, unless the CPU is asked for."""
    if wanted == "cpu":
        return "cpu"
    import torch

    if wanted == "auto" and not torch.cuda.is_available():
        return "cpu"
    from cuda_ext.build import load_extension
    from tinyvllm_cli.llm import require_cuda

    try:
        require_cuda()
        load_extension(say)
    except UserError as error:
        if wanted == "cuda":
            raise
        warn(f"measuring on the CPU, because CUDA cannot be used: {error}")
        return "cpu"
    return "cuda"


@dataclass(slots=True)
class Session:
    """Runs cases, each on a fresh engine if the one before has failed.

    Attributes:
        model: checkpoint folder, or configuration for random weights.
        device: "cuda" or "cpu".
        cases: all that will be run; limits and KV cache are sized for the largest.
        engine: arguments of `LLM` that the user insists on.
        seed, warmup: as for `Meter`.
        say: told what is going on.
        ceiling: once known.
        isolated: run each case in a process of its own; set when a failure has made CUDA useless for this process.
    """

    model: Path | ModelConfig
    device: str
    cases: Sequence[Case]
    engine: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    warmup: bool = True
    say: Say = lambda text: None
    ceiling: Ceiling | None = None
    isolated: bool = False
    _llm: LLM | None = None
    _meter: Meter | None = None

    def config(self) -> ModelConfig:
        return self.model if isinstance(self.model, ModelConfig) else read_config(self.model)

    @property
    def dtype(self) -> str:
        """What `LLM` will compute in."""
        asked: str | None = self.engine.get("dtype")
        if asked not in (None, "auto"):
            return str(asked)
        return "float32" if self.device == "cpu" else "float16" if self.config().dtype == "float16" else "bfloat16"

    def arguments(self) -> dict[str, Any]:
        """The arguments of `LLM`: what the user insists on, and else what the cases need."""
        given = {name: value for name, value in self.engine.items() if value is not None}
        block_size = given.get("block_size", 16)
        longest = max(case.context for case in self.cases) + 2 * block_size  # room, so that nobody waits for blocks
        arguments: dict[str, Any] = {
            "max_num_seqs": max(1, *(case.batch for case in self.cases)),
            "max_model_len": min(longest, self.config().max_position_embeddings),
            "prefix_cache": False,
        }
        if "kv_cache_memory" not in given and "memory_fraction" not in given:
            arguments["num_kv_blocks"] = max(case.kv_blocks(block_size) for case in self.cases)
        return arguments | given | {"device": self.device}

    @property
    def llm(self) -> LLM:
        if self._llm is None:
            from tinyvllm_cli.llm import LLM

            self._llm = LLM(self.model, progress=self.say, **self.arguments())
        return self._llm

    @property
    def meter(self) -> Meter:
        if self._meter is None:
            self._meter = Meter(self.llm, self.ceiling, seed=self.seed, warmup=self.warmup)
        return self._meter

    def close(self) -> None:
        """Gives the model's memory back."""
        self._llm = self._meter = None
        gc.collect()
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def measure(self, case: Case, repetitions: int, budget_s: float = float("inf")) -> Result:
        """The result of a case; a failure becomes a result that says why, and the next case has a new engine."""
        began = time.perf_counter()
        try:
            if case.test == "start":
                return measure_start(case, self.model, self.device, self.dtype, repetitions, budget_s)
            longest = self.config().max_position_embeddings
            if case.context > longest:
                raise UserError(f"{case.context} tokens are more than the {longest} that the model was made for")
            if self.isolated:
                return self._measure_elsewhere(case, repetitions, budget_s)
            return self.meter.measure(case, repetitions, budget_s)
        except Exception as error:
            result = empty_result(case)
            name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            result.error = f"{name}{error} (after {time.perf_counter() - began:.1f} s)"
            error.__traceback__ = None  # it would keep the engine's memory
        try:
            self.close()
            if self.device == "cuda":
                import torch

                torch.cuda.synchronize()
        except Exception:  # such as an illegal access in a kernel, after which every call fails
            self.isolated = True
        return result

    def _measure_elsewhere(self, case: Case, repetitions: int, budget_s: float) -> Result:
        """As `measure`, in a new process."""
        other = replace(self, say=_say_nothing, isolated=False, _llm=None, _meter=None)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(other.measure, case, repetitions, budget_s).result()


def _say_nothing(text: str) -> None:
    pass


def torch_device(name: str) -> torch.device:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")
