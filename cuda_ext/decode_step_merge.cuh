// How decode_step merges the parts of split contexts: each element of the attention's output once, by a warp somewhere,
// so that whoever multiplies it need not know of parts.
#pragma once

#include "decode_step_attention.cuh"

namespace tinyvllm {

__device__ __forceinline__ void load_missing(uint4& v, const void* address) {
  if (has_hole(v)) v = load16_relaxed(address);
}

// Combines the octets' values of a lane's position, in all octets.
template <typename Combine>
__device__ __forceinline__ float across_octets(float value, Combine&& combine) {
  value = combine(value, __shfl_xor_sync(kAllLanes, value, 8));
  return combine(value, __shfl_xor_sync(kAllLanes, value, 16));
}

// Merges split contexts by the logarithms of their parts' sums: a warp takes 64 elements of a head, its octets of lanes
// take parts in turn. The CTAs that have no parts of contexts begin.
template <typename T, int head_dim>
__device__ __forceinline__ void merge_parts(const StepArguments<T>& a, const StepShared& s, uint32_t* layer_words,
                                            const Patience& patience) {
  constexpr int most = kMaxContextSplits / 4;
  const int octet = threadIdx.x % kWarpSize / 8;
  const int pieces = a.num_heads * (head_dim / 64);
  const int64_t part_words = static_cast<int64_t>(a.num_rows) * a.num_heads * kRecordWords<head_dim>;
  const int first = gridDim.x - 1 - blockIdx.x + threadIdx.x / kWarpSize * gridDim.x;
  for (int i = first; i < a.num_rows * pieces; i += kStepWarps * gridDim.x) {
    const int num_parts = s.num_splits[i / pieces];
    if (num_parts == 1) continue;
    const int head = i / (head_dim / 64);  // of all rows
    const int word = i % (head_dim / 64) * 32 + threadIdx.x % 8 * 4;
    const uint32_t* record = layer_words + a.exchange.parts + head * kRecordWords<head_dim>;
    uint4 value[most];
    uint32_t log_sum[most];
#pragma unroll
    for (int p = 0; p < most; ++p) {
      const bool real = octet + 4 * p < num_parts;
      const uint32_t start = real ? kHole : 0;
      log_sum[p] = real ? kHole : __float_as_uint(kLowest);
      value[p] = make_uint4(start, start, start, start);
    }
#pragma unroll 1
    for (bool holes = true; holes;) {
      holes = false;
#pragma unroll
      for (int p = 0; p < most; ++p) {
        const uint32_t* part = record + (octet + 4 * p) * part_words;
        load_missing(value[p], part + word);
        if (log_sum[p] == kHole) log_sum[p] = load4_relaxed(part + head_dim / 2);
      }
#pragma unroll
      for (int p = 0; p < most; ++p) holes |= has_hole(value[p]) || log_sum[p] == kHole;
      holes = __any_sync(kAllLanes, holes) && !patience.is_over();
    }
    float largest = kLowest;
#pragma unroll
    for (int p = 0; p < most; ++p) largest = fmaxf(largest, __uint_as_float(log_sum[p]));
    largest = across_octets(largest, [](float x, float y) { return fmaxf(x, y); });
    float weight = 0.0f;
    float sum[8] = {};
#pragma unroll
    for (int p = 0; p < most; ++p) {
      const float factor = fast_exp2(__uint_as_float(log_sum[p]) - largest);
      float values[8];
      unpack8<T>(value[p], values);
      weight += factor;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += factor * values[j];
    }
    const auto add = [](float x, float y) { return x + y; };
    const float scale = 1.0f / across_octets(weight, add);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = across_octets(sum[j], add) * scale;
    if (octet == 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        store4_relaxed(layer_words + a.exchange.attention + head * (head_dim / 2) + word + j,
                       pack2<T>(sum[2 * j], sum[2 * j + 1]));
      }
    }
  }
}

}  // namespace tinyvllm
