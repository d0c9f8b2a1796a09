// penalize, for each token v that row i has: x /= repetition where x > 0, else x *= repetition; then, if it is one of the
// answer's, x -= presence + frequency * (times in the answer). count_tokens adds the sampled tokens to what the rows have.
// logits float [R, V]; counts int32 [*, V] = 2 * times in the answer + (1 if in the prompt), by rows[i], as the penalties.
// Grid: (parts of the vocabulary, row), one thread per logit; count_tokens: one thread per row.
// Traffic: 4 V bytes of counts for a row with penalties, and 8 bytes for each token that it has; none for other rows.
// Limits: R up to 65535; rows are distinct; row -1 is padding.
#include "common.cuh"

namespace tinyvllm {
namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void penalize_kernel(float* logits, const int32_t* counts, const int32_t* rows,
                                                            const float* repetition, const float* presence,
                                                            const float* frequency, int vocab_size) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int row = rows[blockIdx.y];
  const int token = blockIdx.x * kThreads + threadIdx.x;
  if (row < 0 || token >= vocab_size) return;
  const float divisor = repetition[row];
  const float once = presence[row];
  const float each = frequency[row];
  if (divisor == 1.0f && once == 0.0f && each == 0.0f) return;
  const int count = counts[static_cast<int64_t>(row) * vocab_size + token];
  if (count == 0) return;
  float* address = logits + static_cast<int64_t>(blockIdx.y) * vocab_size + token;
  float logit = *address;
  logit = logit > 0.0f ? logit / divisor : logit * divisor;
  if (count > 1) logit -= once + each * static_cast<float>(count / 2);
  *address = logit;
}

__global__ __launch_bounds__(kThreads) void count_tokens_kernel(int32_t* counts, const int32_t* sampled,
                                                                const int32_t* rows, int num_rows, int vocab_size) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= num_rows) return;
  const int row = rows[i];
  const int token = sampled[i];
  if (row >= 0 && token >= 0 && token < vocab_size) counts[static_cast<int64_t>(row) * vocab_size + token] += 2;
}

}  // namespace

cudaError_t penalize(float* logits, const int32_t* counts, const int32_t* rows, const float* repetition,
                     const float* presence, const float* frequency, int num_rows, int vocab_size,
                     cudaStream_t stream) {
  if (num_rows < 0 || num_rows > 65535 || vocab_size <= 0) return cudaErrorInvalidValue;
  if (num_rows == 0) return cudaSuccess;
  return launch(penalize_kernel, dim3(ceil_div(vocab_size, kThreads), num_rows), kThreads, 0, stream, logits, counts,
                rows, repetition, presence, frequency, vocab_size);
}

cudaError_t count_tokens(int32_t* counts, const int32_t* sampled, const int32_t* rows, int num_rows, int vocab_size,
                         cudaStream_t stream) {
  if (num_rows < 0 || num_rows > 65535 || vocab_size <= 0) return cudaErrorInvalidValue;
  if (num_rows == 0) return cudaSuccess;
  return launch(count_tokens_kernel, ceil_div(num_rows, kThreads), kThreads, 0, stream, counts, sampled, rows, num_rows,
                vocab_size);
}

}  // namespace tinyvllm
