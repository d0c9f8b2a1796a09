// log(softmax(logits[i])) of the sampled token (column 0) and of the num_logprobs[rows[i]] most probable tokens (1, 2, ...).
// values float and token_ids int32 [R, W]; logits float [R, V]; of equal logits the lowest token comes first.
// Grid: one CTA per row; rows that ask for none (-1) and padding (row -1) return at once.
// Traffic: 4 V bytes for each row that asks, from L2 then k + 1 times more: a pass finds the largest logit below the last.
// Limits: W at least 1; beyond a vocabulary of fewer tokens the columns get token -1. Sums have a fixed order.
#include "rank.cuh"

namespace tinyvllm {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;

// The greatest of the CTA's values, for every thread.
__device__ uint64_t cta_max(uint64_t value, uint64_t* partial) {
  value = warp_max_rank(value);
  __syncthreads();  // the readers of the previous call are done
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  for (int i = 0; i < kWarps; ++i) value = partial[i] > value ? partial[i] : value;
  return value;
}

__global__ __launch_bounds__(kThreads) void logprobs_kernel(float* values, int32_t* token_ids, const float* logits,
                                                            const int32_t* sampled, const int32_t* rows,
                                                            const int32_t* num_logprobs, int width, int vocab_size) {
  __shared__ uint64_t partial[kWarps];
  allow_next_kernel();
  wait_for_previous_kernel();
  const int i = blockIdx.x;
  const int row = rows[i];
  const int asked = row >= 0 ? num_logprobs[row] : -1;
  if (asked < 0) return;
  const float* row_logits = logits + static_cast<int64_t>(i) * vocab_size;
  values += static_cast<int64_t>(i) * width;
  token_ids += static_cast<int64_t>(i) * width;

  uint64_t best = 0;
  for (int token = threadIdx.x; token < vocab_size; token += kThreads) {
    const uint64_t rank = rank_of(row_logits[token], token);
    best = rank > best ? rank : best;
  }
  best = cta_max(best, partial);
  const float largest = row_logits[index_of_rank(best)];
  float sum = 0.0f;
  for (int token = threadIdx.x; token < vocab_size; token += kThreads) sum += expf(row_logits[token] - largest);
  const float log_sum = largest + logf(cta_sum<kThreads>(sum));

  if (threadIdx.x == 0) {
    const int token = sampled[i];
    const bool known = token >= 0 && token < vocab_size;
    token_ids[0] = token;
    values[0] = known ? row_logits[token] - log_sum : -INFINITY;
  }
  for (int k = 1; k < width && k <= asked; ++k) {
    if (threadIdx.x == 0) {
      const int token = best > 0 ? index_of_rank(best) : -1;
      token_ids[k] = token;
      values[k] = token >= 0 ? row_logits[token] - log_sum : -INFINITY;
    }
    uint64_t next = 0;
    for (int token = threadIdx.x; token < vocab_size; token += kThreads) {
      const uint64_t rank = rank_of(row_logits[token], token);
      next = rank < best && rank > next ? rank : next;
    }
    best = cta_max(next, partial);
  }
}

}  // namespace

cudaError_t logprobs(float* values, int32_t* token_ids, const float* logits, const int32_t* sampled,
                     const int32_t* rows, const int32_t* num_logprobs, int num_rows, int width, int vocab_size,
                     cudaStream_t stream) {
  if (num_rows < 0 || width <= 0 || vocab_size <= 0) return cudaErrorInvalidValue;
  if (num_rows == 0) return cudaSuccess;
  return launch(logprobs_kernel, num_rows, kThreads, 0, stream, values, token_ids, logits, sampled, rows, num_logprobs,
                width, vocab_size);
}

}  // namespace tinyvllm
