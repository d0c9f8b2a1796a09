// The way out of linear_hopper's sums: activation, exchange within a cluster, rounding, wide stores. A multiplying thread
// has of each 8 rows of x four sums, in wgmma's layout: of rows 2 q and 2 q + 1, q = lane % 4, the features g and g + 8 of
// its warp's 16, g = lane / 4; when gated, gate and up of feature g of its warp's 8.
#pragma once

#include "linear_hopper.cuh"

namespace tinyvllm {

constexpr int kSliceRows = 16;         // stored at once by a warp, through shared memory:
constexpr int kSlicePitch = 16 + 4;    // floats of a row of its slice (16 features); no bank conflicts
constexpr int kSliceFloats = kSliceRows * kSlicePitch;
constexpr int kSliceBytes = kConsumerWarps * kSliceFloats * 4;
constexpr int kPieceBytes = kConsumers * 16;  // of the sums of 8 rows

// Shared memory that a CTA needs beyond its ring.
template <int kRows>
int stage_bytes(const Work& work) {
  return work.gated && work.layout.splits == 1 ? kRows * kTileRowBytes : kSliceBytes;
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

// Puts the sums of 8 rows into the warp's slice, from its row first_row on.
__device__ __forceinline__ void put_in_slice(float* slice, int first_row, float4 sums, bool gated) {
  const int g = threadIdx.x % kWarpSize / 4;
  float* even = slice + (first_row + 2 * (threadIdx.x % 4)) * kSlicePitch + g;
  float* odd = even + kSlicePitch;
  if (gated) {
    *even = silu(sums.x) * sums.z;
    *odd = silu(sums.y) * sums.w;
  } else {
    *even = sums.x;
    *odd = sums.y;
    even[8] = sums.z;
    odd[8] = sums.w;
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
__device__ __forceinline__ void store_unit(void* out, const float (&sums)[kRows / 2], float* slices, int unit_feature,
                                           const Work& work, const Part& part) {
  float* slice = slices + threadIdx.x / kWarpSize * kSliceFloats;
#pragma unroll
  for (int first = 0; first < kRows; first += kSliceRows) {
    if (first >= part.num_rows) break;
#pragma unroll
    for (int i = 0; i < kSliceRows; i += 8) {
      const float* of_row = sums + (first + i) / 2;
      put_in_slice(slice, i, make_float4(of_row[0], of_row[1], of_row[2], of_row[3]), false);
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
                                                 int unit_feature, const Work& work, const Part& part) {
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
      words[i] = pack2<T>(silu(of_row[0]) * of_row[2], silu(of_row[1]) * of_row[3]);
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

// Adds up the sums of the CTAs that split K and stores them. Of every 8 rows, one of these CTAs gets the sums of all
// others into its ring, in the order of the splits, each thread those of the threads with its own number.
template <typename T, int kRows>
__device__ __forceinline__ void exchange_and_store(void* out, const float (&sums)[kRows / 2], const Ring<kRows>& ring,
                                                   uint8_t* shared, float* slices, int unit_feature, const Work& work,
                                                   const Part& part) {
  const int splits = work.layout.splits;
  const int num_pieces = ceil_div(part.num_rows, 8);
  const int mine = (num_pieces - part.split + splits - 1) / splits;
  if (threadIdx.x == 0) arrive_expecting(ring.received(), (splits - 1) * mine * kPieceBytes);
  int owner = 0, place = part.split;
#pragma unroll
  for (int piece = 0; piece < kRows / 8; ++piece) {
    if (piece >= num_pieces) break;
    const float4 four = make_float4(sums[4 * piece], sums[4 * piece + 1], sums[4 * piece + 2], sums[4 * piece + 3]);
    const int offset = place * kPieceBytes + threadIdx.x * 16;
    if (owner == part.split) {
      *reinterpret_cast<float4*>(shared + offset) = four;
    } else {
      const int rank = owner * work.layout.halves + part.half;
      store16_async(address_in(ring.slots + offset, rank), four, address_in(ring.received(), rank));
    }
    if (++owner == splits) {
      owner = 0;
      place += splits;
    }
  }
  wait_barrier(ring.received(), 0);

  float* slice = slices + threadIdx.x / kWarpSize * kSliceFloats;
  const float4* parts = reinterpret_cast<const float4*>(shared) + threadIdx.x;
  for (int i = 0; i < mine; ++i) {
    const float4 sum = sum_of_parts(parts, splits, kConsumers);
    const int row = 8 * (part.split + i * splits);
    put_in_slice(slice, 0, sum, work.gated);
    __syncwarp();
    store_slice<T>(out, slice, 0, part.first_row + row, part.num_rows - row, unit_feature, work);
    __syncwarp();
  }
}

}  // namespace tinyvllm
