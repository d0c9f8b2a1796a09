// For each i < S, row = rows[i]: token = last_tokens[row]; p = next_positions[i]++; slot of p through block_table[row].
// int32: token_ids, positions, slots, context_lens, next_positions, rows [S], last_tokens [*], block_table [*, stride].
// Grid: one thread per sequence.
// Traffic: about 40 S bytes; bound by latency.
// Limits: none; row -1 is padding (token 0, position 0, slot -1, context 0); a position past the table gets slot -1.
#include "common.cuh"

namespace tinyvllm {
namespace {

constexpr int kThreads = 128;

__global__ __launch_bounds__(kThreads) void decode_inputs_kernel(int32_t* token_ids, int32_t* positions, int32_t* slots,
                                                                 int32_t* context_lens, int32_t* next_positions,
                                                                 const int32_t* last_tokens, const int32_t* rows,
                                                                 const int32_t* block_table, int table_stride,
                                                                 int block_size, int num_seqs) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= num_seqs) return;
  const int row = rows[i];
  int token = 0;
  int position = 0;
  int slot = -1;
  if (row >= 0) {
    token = last_tokens[row];
    position = next_positions[i];
    next_positions[i] = position + 1;
    const int column = position / block_size;
    if (column < table_stride) {
      slot = block_table[static_cast<int64_t>(row) * table_stride + column] * block_size + position % block_size;
    }
  }
  token_ids[i] = token;
  positions[i] = position;
  slots[i] = slot;
  context_lens[i] = row >= 0 ? position + 1 : 0;
}

}  // namespace

cudaError_t decode_inputs(int32_t* token_ids, int32_t* positions, int32_t* slots, int32_t* context_lens,
                          int32_t* next_positions, const int32_t* last_tokens, const int32_t* rows,
                          const int32_t* block_table, int table_stride, int block_size, int num_seqs,
                          cudaStream_t stream) {
  if (num_seqs < 0 || table_stride <= 0 || block_size <= 0) return cudaErrorInvalidValue;
  if (num_seqs == 0) return cudaSuccess;
  return launch(decode_inputs_kernel, ceil_div(num_seqs, kThreads), kThreads, 0, stream, token_ids, positions, slots,
                context_lens, next_positions, last_tokens, rows, block_table, table_stride, block_size, num_seqs);
}

}  // namespace tinyvllm
