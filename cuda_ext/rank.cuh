// The largest logit of a row as one number, so that parts of a row are merged by the maximum; and when it is no answer.
#pragma once

#include "common.cuh"

namespace tinyvllm {

// Keys have the order of the floats; NaN, which arithmetic makes positive, is above all.
__device__ __forceinline__ uint32_t key_of(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The greatest rank belongs to the largest value, and to the lowest index among equal ones; 0 is below all.
__device__ __forceinline__ uint64_t rank_of(float value, int index) {
  return static_cast<uint64_t>(key_of(value)) << 32 | ~static_cast<uint32_t>(index);
}

__device__ __forceinline__ float value_of_rank(uint64_t rank) { return value_of(static_cast<uint32_t>(rank >> 32)); }

__device__ __forceinline__ int index_of_rank(uint64_t rank) { return static_cast<int>(~static_cast<uint32_t>(rank)); }

// The token of a row's greatest rank; -1 where the largest logit is NaN or infinite, or there is none.
__device__ __forceinline__ int token_of_rank(uint64_t rank) {
  return isfinite(value_of_rank(rank)) ? index_of_rank(rank) : -1;
}

__device__ __forceinline__ uint64_t max_rank(uint64_t a, uint64_t b) { return b > a ? b : a; }

// Of the lanes whose numbers differ in the bits from `first` up to below `end`.
template <int first, int end>
__device__ __forceinline__ uint64_t max_rank_of_lanes(uint64_t rank) {
#pragma unroll
  for (int offset = end / 2; offset >= first; offset /= 2) {
    rank = max_rank(rank, __shfl_xor_sync(kAllLanes, rank, offset));
  }
  return rank;
}

__device__ __forceinline__ uint64_t warp_max_rank(uint64_t rank) { return max_rank_of_lanes<1, kWarpSize>(rank); }

// NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float min_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace tinyvllm
