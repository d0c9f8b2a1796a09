"""tinyvllm: Llama inference from checkpoint to text.

>>> from tinyvllm_cli import LLM, SamplingParams
>>> llm = LLM("demo")
>>> [output] = llm.chat([{"role": "user", "content": "Capital of France?"}])
>>> output.outputs[0].text
'The capital of France is Paris.'

Importing this package loads nothing; `LLM` loads torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyvllm_cli.engine.sequence import SamplingParams
    from tinyvllm_cli.errors import UserError
    from tinyvllm_cli.generation import CompletionOutput, Logprob, RequestOutput
    from tinyvllm_cli.llm import LLM

# For libgomp, which reads it when torch is loaded: a thread that waits for the others of a matrix product spins for
# some 20 us, then sleeps. By its own choice it spins for milliseconds, and when the machine has other work too it takes
# from the others the core that they wait for: SmolLM2-135M made 0.7 instead of 10.5 tokens a second beside two busy
# processes on 2 cores; alone the difference is within the noise (2%).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "UserError", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "LLM":
        from tinyvllm_cli.llm import LLM

        return LLM
    if name in ("SamplingParams", "UserError"):
        from tinyvllm_cli import errors
        from tinyvllm_cli.engine import sequence

        return sequence.SamplingParams if name == "SamplingParams" else errors.UserError
    from tinyvllm_cli import generation

    return getattr(generation, name)
