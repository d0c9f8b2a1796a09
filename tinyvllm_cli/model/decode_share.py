"""How a step of decodes is run, by what was measured: in one kernel or by single ops, and how attention is cut up."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tinyvllm_cli.memory.plan import decode_splits

FUSED_CONTEXTS = {1: 32_768, 2: 14_336, 3: 8_192, 4: 6_144, 5: 4_096, 6: 3_072, 7: 2_560, 8: 2_048}
"""Batch size -> the longest context of a row up to which decodes run as the one op `decode_step`.

Llama-3.2-1B on an H200, ms a step of captured single ops / of decode_step; the limits are extrapolated from these:
1, 2, 4, 8 rows x 128 tokens    0.740 / 0.583  0.748 / 0.593  0.761 / 0.619  0.791 / 0.672
1, 4 x 1,024; 8 x 1,200         0.767 / 0.609  0.816 / 0.694  0.899 / 0.779
1 x 16,000; 2 x 12,000          0.887 / 0.805  0.948 / 0.910
3 x 6,000; 4 x 4,500            0.910 / 0.860  0.909 / 0.848
"""
EVEN = 1.25
"""Contexts are uneven if one is longer than this many times the mean, as in `decode_parts`."""
MIN_WARPS = ((768, 8), (384, 4))
"""Mean length of uneven contexts, from the longest, and how many warps shall attend to a part together from there on.

A layer of Llama-3.2-1B on an H200, us, for the rows x mean context of a mixed job, by min_warps 1 / 4 / 8:
256 x 577    146.9 / 143.1 / 144.4    201 x 816    152.8 / 149.5 / 149.1    166 x 917    142.2 / 139.0 / 138.5
147 x 968    135.6 / 132.3 / 131.4    117 x 1,081  118.4 / 117.6 / 116.9    82 x 1,268   103.2 / 103.5 / 101.7
Shorter ones: 256 x 286   110.1 / 108.4 / 118.3    256 x 411    127.0 / 123.3 / 127.7    160 x 305   87.5 / 87.1 / 91.1
Contexts of equal length: 256 x 190   95.2 / 98.5 / 111.5    256 x 1,000  192.0 / 192.9 / 192.4
"""


class DecodeShare(NamedTuple):
    """Of `attention_decode` and `decode_parts`."""

    num_splits: int
    min_warps: int


def decode_share(num_seqs: int, num_kv_heads: int, context_lens: npt.NDArray[np.int32]) -> DecodeShare:
    """For contexts of these lengths among at most `num_seqs`; without any the batch is like one of equal ones."""
    min_warps = 1
    if len(context_lens):
        mean = int(context_lens.sum()) / len(context_lens)
        if int(context_lens.max()) > EVEN * mean:
            min_warps = next((warps for least, warps in MIN_WARPS if mean >= least), 1)
    return DecodeShare(decode_splits(max(num_seqs, 1), num_kv_heads), min_warps)
