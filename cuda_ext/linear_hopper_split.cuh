// What linear_hopper and add_linear_hopper share beyond the products: the exchange of sums in a cluster that splits K, the
// slices by which warps get them in order, and the launch. A multiplying thread has of each 8 rows of x four sums, in
// wgmma's layout: of rows 2 q and 2 q + 1, q = lane % 4, the features g and g + 8 of its warp's 16, g = lane / 4; when
// gated, gate and up of feature g of its warp's 8.
#pragma once

#include "linear_hopper.cuh"

namespace tinyvllm {

constexpr int kSlicePitch = 16 + 4;           // floats of a row of a warp's slice (16 features); no bank conflicts
constexpr int kPieceBytes = kConsumers * 16;  // of the sums of 8 rows

constexpr int kMaxClusterSize = 8;  // the largest that every device takes
// Two CTAs share their weights from so many rows on, for up to so many chunks: they exchange half of the sums, but stream
// the weights slower. us of qkv, o and down of Llama-3.2-1B at 128 rows: 9.5, 7.9, 14.9 alone, 9.3, 6.8, 17.1 in pairs; at
// 64: 6.1, 5.8, 11.8 alone, 6.7, 5.8, 13.5 in pairs.
constexpr int kPairRows = 97;
constexpr int kPairChunks = 64;

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

// Of the part's rows, the first one of the CTA's own piece i.
__device__ __forceinline__ int first_row_of(int i, const Work& work, const Part& part) {
  return 8 * (part.split + i * work.layout.splits);
}

// Adds up the sums of the CTAs that split K, for finish(own piece, its sums). The owner of a piece gets those of all others
// into its ring, in the order of the splits, each thread those of the threads with its own number.
template <int kRows, typename Finish>
__device__ __forceinline__ void exchange(const float (&sums)[kRows / 2], const Ring<kRows>& ring, uint8_t* shared,
                                         const Work& work, const Part& part, const Finish& finish) {
  const int splits = work.layout.splits;
  const int num_pieces = ceil_div(part.num_rows, 8);
  if (threadIdx.x == 0) arrive_expecting(ring.received(), (splits - 1) * part.own_pieces * kPieceBytes);
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
  const float4* parts = reinterpret_cast<const float4*>(shared) + threadIdx.x;
  for (int i = 0; i < part.own_pieces; ++i) finish(i, sum_of_parts(parts, splits, kConsumers));
}

// ---- Host ----

inline Work plan_work(int num_rows, int out_features, int in_features, bool gated) {
  Work work{};
  work.num_rows = num_rows;
  work.out_features = out_features;
  work.gated = gated;
  Layout& layout = work.layout;
  layout.num_units = ceil_div(out_features, work.unit_features());
  layout.num_chunks = ceil_div(in_features, kTileColumns);
  const bool has_room = 2 * layout.num_units <= device_attribute(cudaDevAttrMultiProcessorCount, 1);
  layout.halves = has_room && num_rows >= kPairRows && layout.num_chunks <= kPairChunks ? 2 : 1;
  return work;
}

// As many splits as there are SMs for, if all clusters can run at once.
template <typename Kernel>
cudaError_t choose_splits(Layout* layout, Kernel kernel) {
  const int num_sms = device_attribute(cudaDevAttrMultiProcessorCount, 1);
  layout->num_clusters = layout->num_units < num_sms ? layout->num_units : num_sms;
  const int for_sms = num_sms / layout->num_clusters;
  int splits = (for_sms < kMaxClusterSize ? for_sms : kMaxClusterSize) / layout->halves;
  splits = splits < layout->num_chunks ? splits : layout->num_chunks;
  for (; splits > 1; --splits) {
    int resident = 0;
    const cudaError_t error = max_clusters(&resident, kernel, kThreads, splits * layout->halves, shared_limit());
    if (error != cudaSuccess) return error;
    if (resident >= layout->num_clusters) break;
  }
  layout->splits = splits;
  return cudaSuccess;
}

// Divides shared memory, in which sums may be exchanged (from its start on), and launches
// kernel(arguments..., maps of x and weight, work).
template <int kRows, typename Kernel, typename... Arguments>
cudaError_t launch_products(Kernel kernel, const void* x, const void* weight, Work work, int stage_bytes,
                            int in_features, cudaStream_t stream, const Arguments&... arguments) {
  const int splits = work.layout.splits;
  const int ring_bytes = place_ring<kRows>(&work, stage_bytes);
  const int exchange_bytes = splits * ceil_div(kRows / 8, splits) * kPieceBytes;
  work.stage_at = exchange_bytes > ring_bytes ? exchange_bytes : ring_bytes;
  work.barriers_at = work.stage_at + stage_bytes;
  CUtensorMap x_map, weight_map;
  const cudaError_t error = describe_operands<kRows>(&x_map, &weight_map, x, weight, work, in_features);
  if (error != cudaSuccess) return error;
  const int cluster_size = work.layout.cluster_size();
  return launch_clusters(kernel, work.layout.num_clusters * cluster_size, kThreads, cluster_size,
                         work.barriers_at + Ring<kRows>::barrier_bytes(work.num_slots), stream, arguments..., x_map,
                         weight_map, work);
}

}  // namespace tinyvllm
