// Declarations of every kernel launcher. Plain C++: read by g++ (bindings.cpp) and nvcc (each .cu).
//
// Conventions. All pointers are device pointers, 16-byte aligned, row-major and contiguous unless a stride is given.
// A launcher neither allocates nor synchronises. Input that a kernel does not support returns cudaErrorInvalidValue
// before anything is launched; otherwise the launch's own error is returned. Dtype is that of activations and weights
// (bf16 or fp16) unless a parameter says otherwise.
//
//   kv_cache     [num_blocks, num_kv_heads, 2 (K then V), block_size, head_dim], one layer
//   block_table  int32 [max_num_seqs, table_stride]; entry [row, p / block_size] is the block of position p
//   rows         int32 [num_seqs], the block-table row of each sequence; -1 is padding (produces no store, no token)
//   slots        int32 [num_tokens], block * block_size + offset; -1: K and V are not stored
//   context_lens int32 [num_seqs], tokens in the cache including those of this step; 0 is padding (output is zero)
//   rope_table   float [max_position, head_dim]: head_dim/2 cosines, then head_dim/2 sines
//   qkv          [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], rows hold q heads, k heads, v heads
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tinyvllm {

enum class Dtype : int { kF32 = 0, kF16 = 1, kBF16 = 2 };

// out[t, :] = weight[token_ids[t], :]; an id outside [0, vocab_size) gives a zero row.
cudaError_t embedding(void* out, const void* weight, const int32_t* token_ids, int num_tokens, int hidden_size,
                      int vocab_size, Dtype dtype, cudaStream_t stream);

// out = x / sqrt(mean(x^2) + eps) * weight, per row.
cudaError_t rms_norm(void* out, const void* x, const void* weight, int num_tokens, int hidden_size, float eps,
                     Dtype dtype, cudaStream_t stream);

// residual += x (rounded to dtype); out = rms_norm(residual).
cudaError_t add_rms_norm(void* out, void* residual, const void* x, const void* weight, int num_tokens,
                         int hidden_size, float eps, Dtype dtype, cudaStream_t stream);

// Rotates q in place inside qkv (halves i and i + head_dim/2, the Hugging Face layout); writes rotated k and v to the cache.
// A token with slot -1 is left alone.
cudaError_t rope_store(void* qkv, void* kv_cache, const float* rope_table, const int32_t* positions,
                       const int32_t* slots, int num_tokens, int num_heads, int num_kv_heads, int head_dim,
                       int block_size, Dtype dtype, cudaStream_t stream);

// out[t, i] = silu(gate_up[t, i]) * gate_up[t, intermediate_size + i].
cudaError_t silu_mul(void* out, const void* gate_up, int num_tokens, int intermediate_size, Dtype dtype,
                     cudaStream_t stream);

// out[m, n] = sum_k x[m, k] * weight[n, k], 1 <= m <= 8. out_dtype is dtype or kF32.
cudaError_t matvec(void* out, const void* x, const void* weight, int num_rows, int out_features, int in_features,
                   Dtype dtype, Dtype out_dtype, cudaStream_t stream);

// A norm between two products needs no kernel of its own. The first product (add_linear_hopper, add_linear_wide) adds to
// the residual and leaves, of each row, the residual times the norm's weights in `scaled` and the residual's sum of squares
// in `sums`: int64 [num_rows], in units of 2^-28, so that the order of the CTAs that add to it makes no difference. It
// sets other_sums [num_rows] to zero: two arrays, zero at first, serve a chain of products in turn. The second product,
// which gets `scaled` as x, divides what it computes of row m by sqrt(sums[m] 2^-28 / in_features + eps).
// Without a norm behind it the first product gets scaled, sums and norm null and writes the residual only (and zeros to
// other_sums, if that is not null); without one ahead of it the second product gets sums null.

// out as by matvec for 1 <= m <= 128, on compute capability 9.0 only (others: cudaErrorNotSupported); for more than 8 rows.
cudaError_t linear_hopper(void* out, const void* x, const void* weight, const int64_t* sums, int num_rows,
                          int out_features, int in_features, float eps, Dtype dtype, Dtype out_dtype,
                          cudaStream_t stream);

// residual += x * weight^T, rounded to dtype, and what the norm needs. out_features is a multiple of 8.
cudaError_t add_linear_hopper(void* residual, void* scaled, int64_t* sums, int64_t* other_sums, const void* x,
                              const void* weight, const void* norm, int num_rows, int out_features, int in_features,
                              Dtype dtype, cudaStream_t stream);

// silu_mul of linear_hopper without rounding between: weight [2 * out_features, in_features], gate rows, then up rows;
// out_features is a multiple of 8.
cudaError_t gated_linear_hopper(void* out, const void* x, const void* weight, const int64_t* sums, int num_rows,
                                int out_features, int in_features, float eps, Dtype dtype, cudaStream_t stream);

// The same for any number of rows from 1 on, better for many; out_features a multiple of 8.
cudaError_t gated_linear_wide(void* out, const void* x, const void* weight, const int64_t* sums, int num_rows,
                              int out_features, int in_features, float eps, Dtype dtype, cudaStream_t stream);

// linear_hopper for any number of rows, made for 129 to 256 and few features: out_features and in_features multiples of 8.
cudaError_t linear_wide(void* out, const void* x, const void* weight, const int64_t* sums, int num_rows,
                        int out_features, int in_features, float eps, Dtype dtype, cudaStream_t stream);

// add_linear_hopper for any number of rows, made for 129 to 256.
cudaError_t add_linear_wide(void* residual, void* scaled, int64_t* sums, int64_t* other_sums, const void* x,
                            const void* weight, const void* norm, int num_rows, int out_features, int in_features,
                            Dtype dtype, cudaStream_t stream);

// sampled[m] and last_tokens[rows[m]] = the n with the largest sum_k x[m, k] * weight[n, k], the lowest of equal ones, for
// 1 <= m <= 256 where linear_hopper works; row -1 is padding and gets -1. ranks: [num_rows], zero before and after.
cudaError_t argmax_linear_hopper(int32_t* sampled, int32_t* last_tokens, int64_t* ranks, const void* x,
                                 const void* weight, const int32_t* rows, int num_rows, int out_features,
                                 int in_features, Dtype dtype, cudaStream_t stream);

// Start of a captured decode step, for each i < num_seqs with row = rows[i]: token_ids[i] = last_tokens[row];
// context_lens[i] = ++next_positions[i]. Padding (row -1): token 0, context length 0, next_positions untouched.
cudaError_t decode_inputs(int32_t* token_ids, int32_t* context_lens, int32_t* next_positions,
                          const int32_t* last_tokens, const int32_t* rows, int num_seqs, cudaStream_t stream);

// How attention_decode shares out its work over contexts of such lengths: parts int32 [num_seqs * num_splits, 8], as
// decode_shape.cuh has them. num_splits: 1 never splits a context; 2 n + 1 splits long contexts of nearly equal length
// in n parts, uneven ones in 2 n on average, and none if they are short. min_warps: that attend to a part together at
// least, up to 8; 1 leaves it to the number of sequences.
cudaError_t decode_parts(int32_t* parts, const int32_t* rows, const int32_t* context_lens, int num_seqs, int num_heads,
                         int num_kv_heads, int head_dim, int num_splits, int min_warps, cudaStream_t stream);

// One query token per sequence, at position context_lens - 1, by the parts that decode_parts made for the same sizes. qkv
// as the linear gives it: q and k are rotated as by rope_store and K and V stored in the cache, but qkv stays as it is.
// out [num_seqs, num_heads * head_dim]. workspace: float [4 + num_seqs * num_heads * num_splits *
// (head_dim + 4)], zero before the first launch and left zero by each.
// In a captured graph it reads parts, block_table, and K and V of all earlier positions, before the kernel ahead of it has
// ended. They must be there before the graph starts, or come from a kernel that has ended before any kernel behind
// `embedding` starts, as decode_parts has ahead of it: embedding lets the next one start only after its own wait, and no
// kernel starts before the one ahead of it has.
cudaError_t attention_decode(void* out, const void* qkv, void* kv_cache, const float* rope_table,
                             const int32_t* block_table, int table_stride, const int32_t* parts, float* workspace,
                             int num_seqs, int num_heads, int num_kv_heads, int head_dim,
                             int block_size, int num_splits, int min_warps, float scale, Dtype dtype,
                             cudaStream_t stream);

// Chunks of queries with history. Sequence s owns query rows query_start[s] to query_start[s + 1]; its last query has
// position context_lens[s] - 1. A query at position p attends to positions 0..p. max_query_len: the longest chunk.
cudaError_t attention_prefill(void* out, const void* q, int64_t q_stride, const void* kv_cache,
                              const int32_t* block_table, int table_stride, const int32_t* rows,
                              const int32_t* query_start, const int32_t* context_lens, int num_seqs,
                              int max_query_len, int num_heads, int num_kv_heads, int head_dim, int block_size,
                              float scale, Dtype dtype, cudaStream_t stream);

// One token per row of logits (float [num_rows, vocab_size]). rows[i] selects the parameters: temperature (0: argmax,
// lowest index wins ties), top_k (0: off), top_p (1: off), min_p (0: off), seed. The draw of a row depends on its seed
// and positions[i] only (Philox4x32-10, key = seed, counter = position). Writes sampled[i] and last_tokens[rows[i]]: -1
// and 0 where a logit is NaN or the largest of them infinite.
// workspace: float [num_rows * sample_workspace_floats()], counters int32 [num_rows], zero before and after.
cudaError_t sample(int32_t* sampled, int32_t* last_tokens, const float* logits, const int32_t* rows,
                   const int32_t* positions, const float* temperature, const int32_t* top_k, const float* top_p,
                   const float* min_p, const int64_t* seeds, float* workspace, int32_t* counters, int num_rows,
                   int vocab_size, cudaStream_t stream);
int sample_workspace_floats();

// Changes logits (float [num_rows, vocab_size]) in place by what row rows[i] has of each token: counts [*, vocab_size] =
// 2 * times in the answer + (1 if in the prompt). Where that is not 0: x /= repetition if x > 0, else x *= repetition;
// for tokens of the answer then x -= presence + frequency * times. Rows with penalties 1, 0, 0 stay as they are.
cudaError_t penalize(float* logits, const int32_t* counts, const int32_t* rows, const float* repetition,
                     const float* presence, const float* frequency, int num_rows, int vocab_size, cudaStream_t stream);

// counts[rows[i], sampled[i]] += 2; rows are distinct but for padding.
cudaError_t count_tokens(int32_t* counts, const int32_t* sampled, const int32_t* rows, int num_rows, int vocab_size,
                         cudaStream_t stream);

// Column 0 of row i: sampled[i] and its log-probability under softmax(logits[i]); columns 1 to num_logprobs[rows[i]], at
// most width - 1: the most probable tokens and theirs, falling; -1 and -inf when there are no more. A row that asks for
// -1, and padding, is left alone, as are its further columns.
cudaError_t logprobs(float* values, int32_t* token_ids, const float* logits, const int32_t* sampled,
                     const int32_t* rows, const int32_t* num_logprobs, int num_rows, int width, int vocab_size,
                     cudaStream_t stream);

struct LlamaShape {
  int num_layers, hidden_size, intermediate_size, vocab_size, num_heads, num_kv_heads, head_dim;
};

// layers: on the host, for each layer the pointers of attn_norm, qkv, o, mlp_norm, gate_up, down.
struct LlamaWeights {
  const void* embed;
  const void* const* layers;
  const void* final_norm;
  const void* lm_head;
};

// A decode step of 1 to 8 rows from the state that decode_inputs starts from, which it advances too: the inputs made, K and
// V of the step's tokens stored in kv_cache [num_layers, num_blocks, ...], logits float [num_rows, vocab_size] and
// context_lens written; with temperature and seeds also sampled and last_tokens, as sample does without top-k, top-p, min-p.
// workspace: int32 [workspace_words], before the first launch 8,256 zeros, then -1; words 4 to 7 are 0, or tell of a wait
// that ended without success: {1 + stage's number, CTA, warp, 0}; words 8 and 9 may hold the address of pinned host
// memory, int32 [4, 8], where step s puts its sampled tokens into row s % 4. num_stages: how many of the 5 num_layers + 1
// are run. times: null, or int64 [CTAs, num_stages, 2], ns when a CTA has a stage's input and when it has written its
// output.
cudaError_t decode_step(float* logits, int32_t* sampled, int32_t* last_tokens, int32_t* next_positions,
                        int32_t* context_lens, void* kv_cache, int32_t* workspace, int64_t workspace_words,
                        int64_t* times, const LlamaWeights& weights, const LlamaShape& shape, const float* rope_table,
                        const int32_t* rows, const int32_t* block_table, const float* temperature,
                        const int64_t* seeds, int table_stride, int num_rows, int num_blocks, int block_size, float eps,
                        float scale, int num_stages, Dtype dtype, cudaStream_t stream);

}  // namespace tinyvllm
