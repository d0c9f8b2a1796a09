// The parts of linear_hopper around its main loop: how CTAs share the work, the ring of tiles, the way out of the sums.
#pragma once

#include "hopper.cuh"

namespace tinyvllm {

constexpr int kMaxRows = 256;
constexpr int kConsumerWarps = 8;                     // two warpgroups
constexpr int kConsumers = kConsumerWarps * kWarpSize;
constexpr int kWeightWarp = kConsumerWarps;           // its first lane issues the copies of weights,
constexpr int kThreads = kConsumers + 2 * kWarpSize;  // that of the last warp the copies of x
constexpr int kGroupFeatures = 64;                    // rows of weight that a warpgroup multiplies
constexpr int kUnitFeatures = 2 * kGroupFeatures;
constexpr int kWeightTileBytes = kGroupFeatures * kTileRowBytes;
constexpr int kMaxSlots = 12;
constexpr int kWeightsInFlight = 4;                   // slots; more would only delay the other accesses
constexpr int kMaxSplits = 8;                         // the largest portable cluster
constexpr int kSliceRows = 16;                        // stored at once by a warp, through shared memory:
constexpr int kSlicePitch = 16 + 4;                   // floats of a row of its slice (16 features),
constexpr int kSliceFloats = kSliceRows * kSlicePitch;
constexpr int kPartialPitch = kUnitFeatures + 4;      // and of a row of a CTA's partial sums; no bank conflicts

// How the CTAs share the weights: CTA i takes unit i / splits, then those gridDim.x / splits further, and of the chunks
// (64 elements of K) a share.
struct Layout {
  int num_ctas, splits;           // splits: the size of a cluster
  int num_units, unit_features;   // features of the output: half as many when gated
  int num_chunks;
  int second_row;                 // of the second warpgroup's tile of weights, from the first one's

  __device__ int first_chunk(int split) const { return num_chunks * split / splits; }
};

struct Work {
  Layout layout;
  int num_rows, out_features;
  int num_slots;               // of the ring
  int slices_at, barriers_at;  // bytes in shared memory
  bool gated, float_out;
};

// Each slot holds a chunk of K: a tile of weights for each warpgroup, and one of x.
template <int kRows>
struct Ring {
  static constexpr int kXBytes = kRows * kTileRowBytes;
  static constexpr int kSlotBytes = 2 * kWeightTileBytes + kXBytes;

  uint32_t slots, barriers;  // addresses in shared memory
  int num_slots;

  __device__ uint32_t weights(int slot, int group) const {
    return slots + slot * kSlotBytes + group * kWeightTileBytes;
  }
  __device__ uint32_t x(int slot) const { return weights(slot, 2); }
  __device__ uint32_t weights_full(int slot) const { return barriers + 8 * slot; }
  __device__ uint32_t x_full(int slot) const { return barriers + 8 * (num_slots + slot); }
  __device__ uint32_t empty(int slot) const { return barriers + 8 * (2 * num_slots + slot); }
};

// Stores four features of a row, those that exist.
template <typename T>
__device__ __forceinline__ void store_features(void* out, int row, int feature, float4 values, const Work& work) {
  if (feature >= work.out_features) return;
  const int64_t first = static_cast<int64_t>(row) * work.out_features + feature;
  if (work.out_features % 4 == 0) {
    if (work.float_out) {
      *reinterpret_cast<float4*>(static_cast<float*>(out) + first) = values;
    } else {
      *reinterpret_cast<uint2*>(static_cast<T*>(out) + first) =
          make_uint2(pack2<T>(values.x, values.y), pack2<T>(values.z, values.w));
    }
  } else {
    const float four[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (feature + i >= work.out_features) break;
      if (work.float_out) {
        static_cast<float*>(out)[first + i] = four[i];
      } else {
        static_cast<T*>(out)[first + i] = from_float<T>(four[i]);
      }
    }
  }
}

// Stores a unit that is one CTA's alone, 16 rows at a time. When gated, the second warpgroup, which has `up`, hands its
// sums to the first, which has `gate`.
template <typename T, int kRows>
__device__ __forceinline__ void store_unit(void* out, const float (&sums)[kRows / 2], float* slices, int unit_feature,
                                           const Work& work) {
  const int warp = threadIdx.x / kWarpSize;
  const int g = threadIdx.x % kWarpSize / 4;
  const int q = threadIdx.x % 4;
  const bool second = threadIdx.x >= kWarpgroup;
  float* slice = slices + warp * kSliceFloats;
  float* handed_over = slices + kConsumerWarps / 2 * kSliceFloats + threadIdx.x % kWarpgroup;
#pragma unroll
  for (int first_row = 0; first_row < kRows; first_row += kSliceRows) {
    if (first_row >= work.num_rows) break;
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = sums[first_row / 2 + i];
    if (work.gated) {
      if (second) {
#pragma unroll
        for (int i = 0; i < 8; ++i) handed_over[i * kWarpgroup] = values[i];
      }
      named_barrier(1, kConsumers);
      if (!second) {
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = silu(values[i]) * handed_over[i * kWarpgroup];
      }
      named_barrier(2, kConsumers);
      if (second) continue;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      slice[(i / 4 * 8 + 2 * q + i % 2) * kSlicePitch + g + i % 4 / 2 * 8] = values[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kSliceRows; i += 8) {
      const int row = i + g;
      if (first_row + row < work.num_rows) {
        const float4 four = *reinterpret_cast<const float4*>(slice + row * kSlicePitch + 4 * q);
        store_features<T>(out, first_row + row, unit_feature + 16 * warp + 4 * q, four, work);
      }
    }
    __syncwarp();
  }
}

// partials[row][feature] = the sums of this CTA.
template <int kRows>
__device__ __forceinline__ void write_partials(float* partials, const float (&sums)[kRows / 2]) {
  const int feature = threadIdx.x / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
  const int row = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    partials[(i / 4 * 8 + row + i % 2) * kPartialPitch + feature + i % 4 / 2 * 8] = sums[i];
  }
}

__device__ __forceinline__ void add(float4& sum, const float4& part) {
  sum.x += part.x;
  sum.y += part.y;
  sum.z += part.z;
  sum.w += part.w;
}

// Adds up the partial sums of all CTAs of the cluster, for this CTA's share of the features, and stores them. Each CTA
// begins with its own and goes on with its successors', so that they do not all read from one at once (that takes eight
// times as long), and yet the order depends on the feature alone.
template <typename T>
__device__ __forceinline__ void reduce_partials(void* out, uint32_t partials, int unit_feature, int split,
                                                const Work& work) {
  const int splits = work.layout.splits;
  const int fours = work.layout.unit_features / 4;
  const int begin = fours * split / splits;
  const int count = fours * (split + 1) / splits - begin;
  for (int i = threadIdx.x; i < work.num_rows * count; i += kConsumers) {
    const int row = i / count;
    const int feature = (begin + i % count) * 4;
    const auto total = [&](int first) {
      const uint32_t source = partials + (row * kPartialPitch + first) * 4;
      float4 parts[kMaxSplits];
#pragma unroll
      for (int s = 0; s < kMaxSplits; ++s) {
        const int from = split + s < splits ? split + s : split + s - splits;
        if (s < splits) parts[s] = load_from(source, from);
      }
#pragma unroll
      for (int s = 1; s < kMaxSplits; ++s) {
        if (s < splits) add(parts[0], parts[s]);
      }
      return parts[0];
    };
    float4 sum = total(feature);
    if (work.gated) {
      const float4 up = total(kGroupFeatures + feature);
      sum = make_float4(silu(sum.x) * up.x, silu(sum.y) * up.y, silu(sum.z) * up.z, silu(sum.w) * up.w);
    }
    store_features<T>(out, row, unit_feature + feature, sum, work);
  }
}

}  // namespace tinyvllm
