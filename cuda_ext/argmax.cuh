// What argmax_linear_hopper does for more rows than it takes itself.
#pragma once

#include "rank.cuh"

namespace tinyvllm {

using Rank = unsigned long long;  // for atomicMax

// ranks[m] = the rank of the largest logit of row m, if it exceeds ranks[m]; for 1 to 256 rows, made for more than 128.
// In argmax_linear_wide.cu.
cudaError_t find_best_wide(Rank* ranks, const void* x, const void* weight, int num_rows, int out_features,
                           int in_features, Dtype dtype, cudaStream_t stream);

}  // namespace tinyvllm
