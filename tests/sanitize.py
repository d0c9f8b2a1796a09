"""Every kernel once at small shapes: `compute-sanitizer --tool memcheck python tests/sanitize.py`.

For `--tool racecheck` add `without-decode-step`: it makes the CTAs of that kernel so slow that they give up waiting for
each other, and then reports what they do.
"""

from __future__ import annotations

import sys

import test_decode_step as d
import test_ops as t
import test_ops_decode as o
import test_ops_linear as lin
import test_ops_sampling as s

import tinyvllm_cli.reference  # noqa: F401
from cuda_ext.build import load_extension


def main() -> None:
    load_extension()
    t.EDGES[:], t.REPEATS, t.LONG, o.LONG = [1, 17, 40, 300], 2, 1000, 1000
    t.test_embedding("cuda", 7)
    for hidden in (576, 2048):
        t.test_rms_norm("cuda", 7, hidden)
        t.test_add_rms_norm("cuda", 7, hidden)
    t.test_rope_store("cuda", 19, 9, 3, 64, 16)
    t.test_rope_store("cuda", 7, 32, 8, 128, 8)
    t.test_silu_mul("cuda", 7, 1536)
    for rows in (1, 3, 8):
        t.test_matvec("cuda", rows, 301, 264)
        t.test_matvec("cuda", rows, 576, 1536)
    lin.REPEATS = 2
    for rows in (9, 40, 128):
        lin.test_linear_hopper("cuda", rows, 301, 264, False)
        lin.test_linear_hopper("cuda", rows, 576, 1536, True)
        lin.test_add_linear_hopper("cuda", rows, 576, 1536)
        lin.test_gated_linear_hopper("cuda", rows, 296, 264, True)
        lin.test_argmax_linear_hopper("cuda", rows, 301, 264)
    lin.test_gated_linear_wide("cuda", 300, 136, 264, True)
    lin.test_gated_linear_wide("cuda", 180, 136, 264, True)
    for rows in (180, 200):
        lin.test_linear_wide("cuda", rows, 136, 520, True)
        lin.test_add_linear_wide("cuda", rows, 136, 520)
        lin.test_add_linear_wide("cuda", rows, 136, 8192)
        lin.test_argmax_linear_hopper("cuda", rows, 301, 264)
    o.test_decode_inputs("cuda")
    for num_heads, num_kv_heads, head_dim in ((9, 3, 64), (16, 4, 128)):
        o.test_attention_decode("cuda", num_heads, num_kv_heads, head_dim, 16)
        for block_size in (16, 32):  # the first is for the Hopper kernel, where there is one
            chunks = [(7, 7), (65, 64), (300, 17)]
            t.test_attention_prefill("cuda", num_heads, num_kv_heads, head_dim, block_size, chunks)
    o.test_attention_decode_of_many("cuda", 80)
    s.test_sample_greedy("cuda", 4099)
    s.test_sample_padding_touches_nothing("cuda")
    for params in ({}, {"top_k": [40], "top_p": [0.9], "min_p": [0.02]}):
        s.test_sample_agrees_with_reference("cuda", params, 300)
    for vocab_size in (1, 300, 4099):
        s.test_penalize("cuda", vocab_size)
        s.test_logprobs("cuda", vocab_size)
    s.test_count_tokens("cuda")
    if "without-decode-step" not in sys.argv:
        d.test_decode_step("cuda", "odd sizes", [15, 16, 17])
        d.test_decode_step("cuda", "wide heads", [7, 0, 64, 33])
        d.test_decode_step_splits_long_contexts("cuda", 2, 700)
    print("every kernel ran")


if __name__ == "__main__":
    main()
