"""Steps as CUDA graphs: the sizes that steps are padded to, which of them are captured, and when.

A captured step costs the host one launch; the same step launched op by op costs it 2 to 4 ms, more than the device
needs for a decode or a short prefill.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from tinyvllm_cli.engine.step_plan import StepPlan
    from tinyvllm_cli.memory.plan import Limits

DECODES = (*range(1, 9), 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Batch sizes of steps that only decode."""
TOKENS = (8, *range(16, 64, 16), *range(64, 256, 32), *range(256, 512, 64), 512, 640, 768, 896, 1024)
"""Tokens that smaller steps with prefill are padded to. Larger ones are not padded, and captured if they only prefill:
equal sizes are rare, but make up much of a job of long prompts."""
WHOLE_CHUNKS = 4
"""Up to so many chunks in a step each may be as long as the step: the CTAs that find nothing to do are few."""
MAX_GRAPHS = 128
"""Graphs that are kept; each takes about half a MiB."""
MAX_SEEN = 10_000
"""Sizes that are remembered to have come once; then that is forgotten of all."""

Work = Callable[[], object]


class StepSize(NamedTuple):
    """T tokens, D decodes, C chunks, and the longest of these: all that shapes and launches of a step depend on."""

    tokens: int
    decodes: int
    chunks: int
    longest: int


def step_size(plan: StepPlan) -> StepSize:
    """The size of a plan as it is."""
    n = plan.num_decodes
    longest = 0 if plan.is_decode_only else int((plan.query_start[n + 1 :] - plan.query_start[n:-1]).max())
    return StepSize(plan.num_tokens, n, plan.num_seqs - n, longest)


def padded_size(size: StepSize, limits: Limits) -> StepSize | None:
    """The size that stands for all those of about as many tokens; None when a step with prefill is too large.

    Decodes are padded to all that a step of so many tokens can have: their number changes from step to step.
    """
    if size.tokens > TOKENS[-1]:
        return None
    tokens = min(TOKENS[bisect_left(TOKENS, size.tokens)], limits.max_batched_tokens)
    chunks = min(_power_of_two(size.chunks), limits.max_num_seqs)
    longest = tokens if chunks <= WHOLE_CHUNKS else min(_power_of_two(size.longest), tokens)
    return StepSize(tokens, min(tokens, limits.max_num_seqs) if size.decodes else 0, chunks, longest)


def decode_bucket(num_seqs: int, limits: Limits) -> int:
    """The batch size that `num_seqs` decodes are padded to."""
    largest = limits.max_num_seqs
    return min(DECODES[bisect_left(DECODES, num_seqs)], largest) if num_seqs <= DECODES[-1] else largest


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


class StepGraphs:
    """Does the work of steps, by a graph where a step of the same key came before.

    The first time that a key comes its work is done as it is: so a size that comes once costs no capture, and whatever
    libraries set up at their first call is set up. The second time it is captured. The work of a key must always be
    the same launches over the same memory.

    Args:
        capture: records work without doing it; what it returns does the work whenever it is called.
    """

    def __init__(self, capture: Callable[[Work], Work]) -> None:
        self.captured: dict[Hashable, Work] = {}
        self._capture = capture
        self._seen: set[Hashable] = set()

    def run(self, key: Hashable, work: Work) -> None:
        replay = self.captured.get(key)
        if replay is None:
            if key not in self._seen or len(self.captured) == MAX_GRAPHS:
                if len(self._seen) == MAX_SEEN:
                    self._seen.clear()
                self._seen.add(key)
                work()
                return
            replay = self.captured[key] = self._capture(work)
        replay()


class CudaCapture:
    """`capture` of StepGraphs on a stream of its own; what the graphs allocate shares one pool."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay
