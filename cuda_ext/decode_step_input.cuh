// The input of decode_step's linear layers: x in registers, as the right operand of the products, times the weights of
// the norm before it.
#pragma once

#include "decode_step.cuh"

namespace tinyvllm {

// What a lane holds of x: with g = lane / 4 and q = lane % 4, of row 4 i + g / 2, and of each chunk of its warp, elements
// 32 (g % 2) + 8q to 8q + 7. Zeros where there is no such row or element.
template <int kGroups, int kHeld>
struct Fragments {
  uint4 v[kGroups][kHeld][kSteps];
};

// The position of the lane's elements of a chunk within a strip.
__device__ __forceinline__ int lane_element(int step) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  return (warp + step * kStepWarps) * kChunk + lane / 4 % 2 * (kChunk / 2) + lane % 4 * 8;
}

// Reads strips first_strip ... of rows of x; if they come from other CTAs, until they are complete. A null row gives
// zeros.
template <typename T, int kGroups, int kHeld>
__device__ __forceinline__ void load_strips(Fragments<kGroups, kHeld>& x, const T* const (&rows)[kGroups],
                                            const LinearShape& l, int first_strip, bool from_ctas,
                                            const Patience& patience) {
  const auto for_each = [&](auto&& action) {
#pragma unroll
    for (int strip = 0; strip < kHeld; ++strip) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const uint32_t bit = 1u << ((strip * kGroups + group) * kSteps + step);
          action(x.v[group][strip][step], bit, rows[group], (first_strip + strip) * l.strip, lane_element(step));
        }
      }
    }
  };
  uint32_t missing = 0;  // a bit for each piece
  for_each([&](uint4& v, uint32_t bit, const T* row, int start, int element) {
    v = make_uint4(0, 0, 0, 0);
    if (row != nullptr && element < l.strip && start + element < l.in_features) missing |= bit;
  });
#pragma unroll 1
  do {
    for_each([&](uint4& v, uint32_t bit, const T* row, int start, int element) {
      if (missing & bit) v = load16_relaxed(row + start + element);
    });
    missing = 0;
    for_each([&](const uint4& v, uint32_t bit, const T*, int, int) { missing |= has_hole(v) ? bit : 0; });
  } while (from_ctas && __any_sync(kAllLanes, missing) && !patience.is_over());
}

// The norm's weights of the lane's elements.
template <int kNormStrips>
struct NormWeights {
  uint4 v[kNormStrips][kSteps];
};

template <int kNormStrips, typename T>
__device__ __forceinline__ NormWeights<kNormStrips> load_norm(const T* weight, const LinearShape& l) {
  NormWeights<kNormStrips> norm;
#pragma unroll
  for (int strip = 0; strip < kNormStrips; ++strip) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int in_strip = lane_element(step);
      const int element = strip * l.strip + in_strip;
      const bool real = in_strip < l.strip && element < l.in_features;
      norm.v[strip][step] = real ? load16_streaming(weight + element) : make_uint4(0, 0, 0, 0);
    }
  }
  return norm;
}

// x *= norm's weights; the root mean square is divided out of the products. squares[row] = the warp's sum of x^2, which
// is on the diagonal of x x^T.
template <typename T, int kGroups, int kNormStrips>
__device__ __forceinline__ void weigh(Fragments<kGroups, kNormStrips>& x, const NormWeights<kNormStrips>& norm,
                                      float (&squares)[kMaxStepRows]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float sums[4] = {};  // of columns 2q and 2q + 1 of row g
#pragma unroll
    for (int strip = 0; strip < kNormStrips; ++strip) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint4& v = x.v[group][strip][step];
        const uint4 weight = norm.v[strip][step];
        mma_16x8x16<T>(sums, {v.x, 0, v.y, 0}, {v.x, v.y});
        mma_16x8x16<T>(sums, {v.z, 0, v.w, 0}, {v.z, v.w});
        v = make_uint4(multiply2<T>(v.x, weight.x), multiply2<T>(v.y, weight.y), multiply2<T>(v.z, weight.z),
                       multiply2<T>(v.w, weight.w));
      }
    }
    const float half = lane / 4 % 2 == 0 ? sums[0] : sums[1];  // on the diagonal where q = g / 2
    const float both = half + __shfl_xor_sync(kAllLanes, half, 4);
    if (lane % 9 == 0) squares[4 * group + lane % 4] = both;
  }
}

}  // namespace tinyvllm
