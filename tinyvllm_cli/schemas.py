"""The schema of each op, as PyTorch's dispatcher has it; `ops.py` says what they do."""

SCHEMAS = {
    "embedding": "(Tensor(a!) out, Tensor weight, Tensor token_ids) -> ()",
    "rms_norm": "(Tensor(a!) out, Tensor x, Tensor weight, float eps) -> ()",
    "add_rms_norm": "(Tensor(a!) out, Tensor(b!) residual, Tensor x, Tensor weight, float eps) -> ()",
    "rope_store": "(Tensor(a!) qkv, Tensor(b!) kv_cache, Tensor rope_table, Tensor positions, Tensor slots) -> ()",
    "silu_mul": "(Tensor(a!) out, Tensor gate_up) -> ()",
    "matvec": "(Tensor(a!) out, Tensor x, Tensor weight) -> ()",
    "linear_hopper": "(Tensor(a!) out, Tensor x, Tensor weight, Tensor? sums, float eps) -> ()",
    "add_linear_hopper": "(Tensor(a!) residual, Tensor(b!)? scaled, Tensor(c!)? sums, Tensor(d!)? other_sums, "
    "Tensor x, Tensor weight, Tensor? norm) -> ()",
    "gated_linear_hopper": "(Tensor(a!) out, Tensor x, Tensor weight, Tensor? sums, float eps) -> ()",
    "gated_linear_wide": "(Tensor(a!) out, Tensor x, Tensor weight, Tensor? sums, float eps) -> ()",
    "linear_wide": "(Tensor(a!) out, Tensor x, Tensor weight, Tensor? sums, float eps) -> ()",
    "add_linear_wide": "(Tensor(a!) residual, Tensor(b!)? scaled, Tensor(c!)? sums, Tensor(d!)? other_sums, "
    "Tensor x, Tensor weight, Tensor? norm) -> ()",
    "argmax_linear_hopper": "(Tensor(a!) sampled, Tensor(b!) last_tokens, Tensor(c!) ranks, Tensor x, Tensor weight, "
    "Tensor rows) -> ()",
    "decode_inputs": "(Tensor(a!) token_ids, Tensor(b!) context_lens, Tensor(c!) next_positions, Tensor last_tokens, "
    "Tensor rows) -> ()",
    "decode_parts": "(Tensor(a!) parts, Tensor rows, Tensor context_lens, int num_heads, int num_kv_heads, "
    "int head_dim, int num_splits, int min_warps) -> ()",
    "attention_decode": "(Tensor(a!) out, Tensor qkv, Tensor(b!) kv_cache, Tensor rope_table, Tensor block_table, "
    "Tensor parts, Tensor(c!) workspace, int num_splits, int min_warps, float scale) -> ()",
    "attention_prefill": "(Tensor(a!) out, Tensor q, Tensor kv_cache, Tensor block_table, Tensor rows, "
    "Tensor query_start, Tensor context_lens, int max_query_len, float scale) -> ()",
    "sample": "(Tensor(a!) sampled, Tensor(b!) last_tokens, Tensor logits, Tensor rows, Tensor positions, "
    "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor(c!) workspace, "
    "Tensor(d!) counters) -> ()",
    "penalize": "(Tensor(a!) logits, Tensor counts, Tensor rows, Tensor repetition, Tensor presence, "
    "Tensor frequency) -> ()",
    "count_tokens": "(Tensor(a!) counts, Tensor sampled, Tensor rows) -> ()",
    "logprobs": "(Tensor(a!) values, Tensor(b!) token_ids, Tensor logits, Tensor sampled, Tensor rows, "
    "Tensor num_logprobs) -> ()",
    "decode_step": "(Tensor(a!) logits, Tensor(b!) sampled, Tensor(c!) last_tokens, Tensor(d!) next_positions, "
    "Tensor(e!) context_lens, Tensor(f!) kv_cache, Tensor(g!) workspace, Tensor embed, Tensor[] layers, "
    "Tensor final_norm, Tensor lm_head, Tensor rope_table, Tensor rows, Tensor block_table, Tensor? temperature, "
    "Tensor? seeds, float eps, float scale, int num_stages, Tensor(h!)? times) -> ()",
}
