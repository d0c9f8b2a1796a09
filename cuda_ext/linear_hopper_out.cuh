// The way out of linear_hopper's sums: the rows' factors, activation, rounding, wide stores.
#pragma once

#include "linear_hopper_split.cuh"
#include "norm_sums.cuh"

namespace tinyvllm {

constexpr int kSliceRows = 16;  // stored at once by a warp, through shared memory
constexpr int kSliceFloats = kSliceRows * kSlicePitch;
constexpr int kSliceBytes = kConsumerWarps * kSliceFloats * 4;

// Shared memory that a CTA needs beyond its ring: to store from, and at the end a factor for each row.
template <int kRows>
int stage_bytes(const Work& work) {
  return (work.gated && work.layout.splits == 1 ? kRows * kTileRowBytes : kSliceBytes) + kRows * 4;
}

// The sums of 8 rows times their factors.
__device__ __forceinline__ float4 scale_rows(float4 sums, const float* factors) {
  const float2 two = *reinterpret_cast<const float2*>(factors + 2 * (threadIdx.x % 4));
  return make_float4(sums.x * two.x, sums.y * two.y, sums.z * two.x, sums.w * two.y);
}

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

// Stores 8 rows of the slice, the first num_rows of them, as rows of out from out_row on.
template <typename T>
__device__ __forceinline__ void store_slice(void* out, const float* slice, int first_row, int out_row, int num_rows,
                                            int unit_feature, const Work& work) {
  const int warp = threadIdx.x / kWarpSize;
  const int row = threadIdx.x % kWarpSize / 4;
  const int feature = threadIdx.x % 4 * 4;
  const int warp_features = work.unit_features() / kConsumerWarps;
  if (row >= num_rows || feature >= warp_features) return;
  const float4 values = *reinterpret_cast<const float4*>(slice + (first_row + row) * kSlicePitch + feature);
  store_features<T>(out, out_row + row, unit_feature + warp * warp_features + feature, values, work);
}

// Stores a unit that is one CTA's alone.
template <typename T, int kRows>
__device__ __forceinline__ void store_unit(void* out, const float (&sums)[kRows / 2], float* slices, const float* factors,
                                           int unit_feature, const Work& work, const Part& part) {
  float* slice = slices + threadIdx.x / kWarpSize * kSliceFloats;
#pragma unroll
  for (int first = 0; first < kRows; first += kSliceRows) {
    if (first >= part.num_rows) break;
#pragma unroll
    for (int i = 0; i < kSliceRows; i += 8) {
      const float* of_row = sums + (first + i) / 2;
      const float4 four = make_float4(of_row[0], of_row[1], of_row[2], of_row[3]);
      put_in_slice(slice, i, scale_rows(four, factors + first + i), false);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kSliceRows; i += 8) {
      store_slice<T>(out, slice, i, part.first_row + first + i, part.num_rows - first - i, unit_feature, work);
    }
    __syncwarp();
  }
}

// The same when gated. The stage is a tile of rows of 64 features, swizzled.
template <typename T, int kRows>
__device__ __forceinline__ void store_gated_unit(void* out, const float (&sums)[kRows / 2], uint8_t* stage,
                                                 const float* factors, int unit_feature, const Work& work, const Part& part) {
  const int warp = threadIdx.x / kWarpSize;
  const int row = threadIdx.x % 16;
  const uint32_t target = shared_address(stage) + row * kTileRowBytes + (warp ^ row % 8) * 16;
  named_barrier(1, kConsumers);  // the unit before has left the stage
#pragma unroll
  for (int first = 0; first < kRows; first += 16) {
    if (first >= part.num_rows) break;
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* of_row = sums + first / 2 + 4 * i;
      const float4 four = make_float4(of_row[0], of_row[1], of_row[2], of_row[3]);
      const float4 scaled = scale_rows(four, factors + first + 8 * i);
      words[i] = pack2<T>(silu(scaled.x) * scaled.z, silu(scaled.y) * scaled.w);
    }
    store_matrices_transposed(target + first * kTileRowBytes, words[0], words[1]);
  }
  named_barrier(1, kConsumers);
  for (int i = threadIdx.x; i < part.num_rows * 8; i += kConsumers) {
    const int out_row = i / 8;
    const int feature = unit_feature + i % 8 * 8;
    if (feature >= work.out_features) continue;
    T* address = static_cast<T*>(out) + static_cast<int64_t>(part.first_row + out_row) * work.out_features + feature;
    store16(address, load16(stage + out_row * kTileRowBytes + (i % 8 ^ out_row % 8) * 16));
  }
}

// Stores what exchange() gives this CTA of a unit.
template <typename T, int kRows>
__device__ __forceinline__ void exchange_and_store(void* out, const float (&sums)[kRows / 2], const Ring<kRows>& ring,
                                                   uint8_t* shared, float* slices, const float* factors,
                                                   int unit_feature, const Work& work, const Part& part) {
  float* slice = slices + threadIdx.x / kWarpSize * kSliceFloats;
  exchange<kRows>(sums, ring, shared, work, part, [&](int i, float4 sum) {
    const int row = first_row_of(i, work, part);
    put_in_slice(slice, 0, scale_rows(sum, factors + row), work.gated);
    __syncwarp();
    store_slice<T>(out, slice, 0, part.first_row + row, part.num_rows - row, unit_feature, work);
    __syncwarp();
  });
}

}  // namespace tinyvllm
