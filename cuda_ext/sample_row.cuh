// One row of logits: sample.cu, and the end of decode_step, which draw the same token from the same logits.
// Weights are integers (40-bit fixed point), so that their sums do not depend on the order of the threads.
#pragma once

#include <cfloat>

#include "rank.cuh"

namespace tinyvllm {
namespace {

constexpr int kMaxVocab = 1 << 22;
constexpr int kSegments = 256;            // of a row
constexpr int kBins = 2048;               // of a row's histogram
constexpr int kBatch = 16;                // logits that a thread loads before it uses the first
constexpr float kOne = 1099511627776.0f;  // 2^40, the weight of the largest logit

__device__ __forceinline__ int segment_size(int vocab_size) {
  return ceil_div(vocab_size, kSegments * kWarpSize) * kWarpSize;
}

__device__ __forceinline__ float scale_of(float temperature) {
  return temperature > 0.0f ? fminf(1.4426950408889634f / temperature, 1e30f) : 0.0f;
}

struct Row {
  const float* logits;
  int size;
  int segment_size;
  float scale;              // log2(e) / temperature; 0 to take the largest logit
  float largest = 0.0f;
  float bins_per_unit = 0.0f;
  float min_p = 0.0f;
  uint32_t lowest_key = 0;  // logits of a lower key are dropped

  __device__ float probability(float logit) const { return exp2f((logit - largest) * scale); }  // the largest has 1

  // In fixed point; 0 for a dropped logit.
  __device__ uint64_t weight(float logit) const {
    const float p = probability(logit);
    return p >= min_p && key_of(logit) >= lowest_key ? __float2ull_rn(p * kOne) : 0;
  }

  // Equal or lower for a larger logit.
  __device__ int bin(float logit) const {
    return static_cast<int>(fminf((largest - logit) * bins_per_unit, static_cast<float>(kBins - 1)));
  }
};

// values[i] = source[i * stride] for i * stride < count, else -inf.
template <int stride>
__device__ __forceinline__ void load_batch(const float* source, int count, float (&values)[kBatch]) {
#pragma unroll
  for (int i = 0; i < kBatch; ++i) values[i] = i * stride < count ? source[i * stride] : -INFINITY;
}

// Calls function(logit) for the share of logits[begin, end) of one of num_workers threads.
template <int num_workers, typename Function>
__device__ __forceinline__ void for_each_logit(const Row& row, int begin, int end, int worker, Function function) {
  const float* source = row.logits + begin + worker;
#pragma unroll 1
  for (int count = end - begin - worker; count > 0; count -= num_workers * kBatch) {
    float values[kBatch];
    load_batch<num_workers>(source, count, values);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i * num_workers < count) function(values[i]);
    }
    source += num_workers * kBatch;
  }
}

struct alignas(16) Summary {
  float largest;   // NaN if there is one
  float smallest;  // of the finite ones
  float sum;       // of exp((logit - largest) / temperature)
  int32_t argmax;
};

// By one warp, which gets the same result in every lane.
__device__ __forceinline__ Summary summarise(const Row& row, int segment) {
  const int begin = segment * row.segment_size;
  const int end = min(begin + row.segment_size, row.size);
  float largest = -INFINITY;
  float smallest = FLT_MAX;
  float sum = 0.0f;
  float best = -INFINITY;
  int argmax = begin;
#pragma unroll 1
  for (int first = begin; first < end; first += kWarpSize * kBatch) {
    const int mine = first + static_cast<int>(threadIdx.x) % kWarpSize;
    float values[kBatch];
    load_batch<kWarpSize>(row.logits + mine, end - mine, values);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (values[i] > best) {
        best = values[i];
        argmax = mine + i * kWarpSize;
      }
      smallest = min_or_nan(smallest, values[i] == -INFINITY ? FLT_MAX : values[i]);
    }
    if (row.scale > 0.0f) {
      const float before = largest;
      largest = warp_max(best);
      const float base = largest == -INFINITY ? 0.0f : largest;
      sum *= exp2f((before - base) * row.scale);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) sum += exp2f((values[i] - base) * row.scale);
    }
  }
  const uint64_t rank = warp_max_rank(rank_of(isnan(smallest) ? smallest : best, argmax));
  return {value_of_rank(rank), -warp_max(-smallest), warp_sum(sum), index_of_rank(rank)};
}

__device__ uint32_t philox(uint64_t seed, uint32_t counter) {
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  uint32_t c[4] = {counter, 0, 0, 0};
#pragma unroll 1
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = static_cast<uint64_t>(0xD2511F53u) * c[0];
    const uint64_t right = static_cast<uint64_t>(0xCD9E8D57u) * c[2];
    c[0] = static_cast<uint32_t>(right >> 32) ^ c[1] ^ key[0];
    c[1] = static_cast<uint32_t>(right);
    c[2] = static_cast<uint32_t>(left >> 32) ^ c[3] ^ key[1];
    c[3] = static_cast<uint32_t>(left);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return c[0];
}

// In (0, 1): Philox4x32-10 of a seed and a position.
__device__ __forceinline__ double uniform(int64_t seed, int position) {
  return (philox(static_cast<uint64_t>(seed), static_cast<uint32_t>(position)) + 0.5) / 4294967296.0;
}

}  // namespace
}  // namespace tinyvllm
