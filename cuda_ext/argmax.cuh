// The largest logit of a row as one number, so that parts of a row are merged by the maximum.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tinyvllm {

// The greatest rank belongs to the largest logit, and to the lowest token among equal ones; 0 is below all.
__device__ __forceinline__ unsigned long long rank_of(float logit, int token) {
  const uint32_t bits = __float_as_uint(logit);
  const uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(key) << 32 | ~static_cast<uint32_t>(token);
}

__device__ __forceinline__ int token_of(unsigned long long rank) {
  return static_cast<int>(~static_cast<uint32_t>(rank));
}

// sampled[i] and last_tokens[rows[i]] = the token of ranks[i], which becomes 0; where row is -1, sampled is -1. In
// argmax_linear_hopper.cu.
cudaError_t take_best(int32_t* sampled, int32_t* last_tokens, unsigned long long* ranks, const int32_t* rows,
                      int num_rows, cudaStream_t stream);

}  // namespace tinyvllm
