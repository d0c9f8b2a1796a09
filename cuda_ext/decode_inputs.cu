// For each i < S, row = rows[i]: token_ids[i] = last_tokens[row]; context_lens[i] = ++next_positions[i].
// int32: token_ids, context_lens, next_positions, rows [S], last_tokens [*].
// Grid: one thread per sequence.
// Traffic: about 24 S bytes; bound by latency.
// Limits: none; row -1 is padding (token 0, context length 0).
#include "common.cuh"

namespace tinyvllm {
namespace {

constexpr int kThreads = 128;

__global__ __launch_bounds__(kThreads) void decode_inputs_kernel(int32_t* token_ids, int32_t* context_lens,
                                                                 int32_t* next_positions, const int32_t* last_tokens,
                                                                 const int32_t* rows, int num_seqs) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= num_seqs) return;
  const int row = rows[i];
  const int length = row < 0 ? 0 : next_positions[i] + 1;
  token_ids[i] = row < 0 ? 0 : last_tokens[row];
  context_lens[i] = length;
  if (row >= 0) next_positions[i] = length;
}

}  // namespace

cudaError_t decode_inputs(int32_t* token_ids, int32_t* context_lens, int32_t* next_positions,
                          const int32_t* last_tokens, const int32_t* rows, int num_seqs, cudaStream_t stream) {
  if (num_seqs < 0) return cudaErrorInvalidValue;
  if (num_seqs == 0) return cudaSuccess;
  return launch(decode_inputs_kernel, ceil_div(num_seqs, kThreads), kThreads, 0, stream, token_ids, context_lens,
                next_positions, last_tokens, rows, num_seqs);
}

}  // namespace tinyvllm
