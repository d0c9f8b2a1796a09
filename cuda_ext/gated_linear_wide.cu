// out[t, i] = silu(sum_k x[t, k] * weight[i, k]) * (sum_k x[t, k] * weight[I + i, k]), fp32 inside, for many tokens t.
// x [T, K], weight [2 I, K], out [T, I] of one 16-bit dtype; contiguous.
// Mapping: a CTA per SM goes from tile to tile, 128 tokens by 128 features. The two CTAs of a cluster take the same features;
//   one copies the gate rows for both, the other the up rows. Two warpgroups multiply 64 tokens by 256 rows each, so that
//   a thread has gate and up of the same output; two warps copy.
// Traffic: 4 T I K flop, bound by the tensor cores (and their power).
// Limits: bf16 or fp16; I and K multiples of 8; compute capability 9.0.
#include <algorithm>
#include <limits>

#include "hopper.cuh"

#pragma nv_diag_suppress 177  // unused: elsewhere than on sm_90a the kernel is empty

namespace tinyvllm {
namespace {

constexpr int kCluster = 2;
constexpr int kMultiplierWarps = 8;
constexpr int kMultipliers = kMultiplierWarps * kWarpSize;
constexpr int kWeightWarp = kMultiplierWarps;           // the last warp copies x
constexpr int kThreads = kMultipliers + 2 * kWarpSize;
constexpr int kTokens = 128;                            // of a tile
constexpr int kFeatures = 128;
constexpr int kStages = 4;                              // of the ring, each a chunk of K: 64 elements
constexpr int kSharedPairs = 8;                         // pairs of token tiles that go through the weights together
constexpr int kStoreRows = 16;                          // of a warp
constexpr int kPanels = kFeatures / kTileColumns;       // of 64 features

struct Shared {
  uint8_t x[kStages][kTokens * kTileRowBytes];
  uint8_t weights[kStages][2][kFeatures * kTileRowBytes];  // gate, up
  uint8_t out[kMultiplierWarps][kPanels][kStoreRows * kTileRowBytes];
  uint64_t full[kStages], empty[kStages];
};

struct Work {
  int num_features, num_chunks, token_pairs, feature_tiles;
};

// The tiles of a CTA, one after another. So many tokens go through all weights at a time that both stay in L2.
struct Walk {
  const Work& work;
  int index, token, feature;  // token and feature: the first ones

  __device__ explicit Walk(const Work& w) : work(w), index(blockIdx.x / kCluster) { locate(); }
  __device__ bool exists() const { return index < work.token_pairs * work.feature_tiles; }
  __device__ void advance() {
    index += gridDim.x / kCluster;
    locate();
  }
  __device__ void locate() {
    const int first_pair = index / (kSharedPairs * work.feature_tiles) * kSharedPairs;
    const int pairs = min(kSharedPairs, work.token_pairs - first_pair);
    const int rest = index - first_pair * work.feature_tiles;
    token = ((first_pair + rest % pairs) * kCluster + blockIdx.x % kCluster) * kTokens;
    feature = rest / pairs * kFeatures;
  }
};

// A warp fills every slot as it becomes free: copy(tile, chunk, slot, barrier) starts what brings `bytes`. Returns the next
// turn.
template <typename Copy>
__device__ __forceinline__ Turn fill_slots(Shared& s, const Work& work, int bytes, const Copy& copy) {
  Turn turn;
  for (Walk tile(work); tile.exists(); tile.advance()) {
    for (int chunk = 0; chunk < work.num_chunks; ++chunk) {
      const uint32_t full = shared_address(&s.full[turn.slot]);
      wait_barrier(shared_address(&s.empty[turn.slot]), turn.parity ^ 1);
      if (elected()) {
        arrive_expecting(full, bytes);
        copy(tile, chunk, turn.slot, full);
      }
      turn.advance(kStages);
    }
  }
  return turn;
}

__device__ __forceinline__ void copy_weights(Shared& s, const CUtensorMap& map, const Work& work) {
  const int matrix = blockIdx.x % kCluster;  // gate or up
  Turn turn = fill_slots(s, work, sizeof(s.weights[0]), [&](const Walk& tile, int chunk, int slot, uint32_t full) {
    copy_tile_to((1 << kCluster) - 1, shared_address(s.weights[slot][matrix]), map,
                 tile.feature + matrix * work.num_features, chunk * kTileColumns, full);
  });
  for (int i = 0; i < kStages; ++i) {  // until the last arrivals from the other CTA have come
    wait_barrier(shared_address(&s.empty[turn.slot]), turn.parity ^ 1);
    turn.advance(kStages);
  }
}

__device__ __forceinline__ void copy_x(Shared& s, const CUtensorMap& map, const Work& work) {
  fill_slots(s, work, sizeof(s.x[0]), [&](const Walk& tile, int chunk, int slot, uint32_t full) {
    copy_tile(shared_address(s.x[slot]), map, tile.token, chunk * kTileColumns, full);
  });
}

// One warpgroup: 64 tokens of each tile. While it stores, the other one may multiply.
template <typename T>
struct Multiplier {
  Shared& s;
  const CUtensorMap& out_map;
  const int warp, lane;
  Turn turn;
  float sums[2 * kFeatures / 2];  // of gate, then of up, laid out as by wgmma

  __device__ __forceinline__ Multiplier(Shared& shared, const CUtensorMap& map)
      : s(shared), out_map(map), warp(threadIdx.x / kWarpSize), lane(threadIdx.x % kWarpSize) {}

  __device__ __forceinline__ void release(int slot) {
    if (lane < kCluster) arrive_at(address_in(shared_address(&s.empty[slot]), lane));
  }

  __device__ __forceinline__ void multiply(int num_chunks) {
    const int row = threadIdx.x / kWarpgroup * (kTokens / 2);
    int previous = 0;
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      wait_barrier(shared_address(&s.full[turn.slot]), turn.parity);
      const uint64_t a = tile_descriptor(shared_address(s.x[turn.slot]) + row * kTileRowBytes);
      const uint64_t b = tile_descriptor(shared_address(s.weights[turn.slot][0]));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTileColumns / 16; ++k) wgmma<T, 2 * kFeatures>(sums, a + 2 * k, b + 2 * k, chunk + k > 0);
      wgmma_commit();
      wgmma_wait<1>();  // the slot before is read
      if (chunk > 0) release(previous);
      previous = turn.slot;
      turn.advance(kStages);
    }
    wgmma_wait<0>();
    settle(sums);
    release(previous);
  }

  __device__ __forceinline__ void store(const Walk& tile) {
    const float* gate = sums;
    const float* up = sums + kFeatures / 2;
    const int row = lane % kStoreRows;
    if (lane == 0) wait_for_stores<0>();  // of the tile before
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kFeatures / 8; j += 2) {  // 16 features
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const int at = 4 * j + i;
        words[i / 2] = pack2<T>(silu(gate[at]) * up[at], silu(gate[at + 1]) * up[at + 1]);
      }
      const uint32_t panel = shared_address(s.out[warp][j * 8 / kTileColumns]);
      const int piece = j % 8 + lane / kStoreRows;
      store_matrices(panel + row * kTileRowBytes + (piece ^ row % 8) * 16, words);
    }
    publish_to_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kPanels; ++i) {
        store_tile(out_map, tile.token + warp * kStoreRows, tile.feature + i * kTileColumns,
                   shared_address(s.out[warp][i]));
      }
    }
  }

  __device__ __forceinline__ void run(const Work& work) {
    for (Walk tile(work); tile.exists(); tile.advance()) {
      multiply(work.num_chunks);
      store(tile);
    }
    if (lane == 0) wait_for_stores<0>();
  }
};

template <typename T>
__device__ __forceinline__ void run_gated_linear(const CUtensorMap& out_map, const CUtensorMap& x_map,
                                                 const CUtensorMap& weight_map, const Work& work) {
  extern __shared__ __align__(kTileAlignment) uint8_t shared_bytes[];
  Shared& s = *reinterpret_cast<Shared*>(shared_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(shared_address(&s.full[i]), 2);
      init_barrier(shared_address(&s.empty[i]), kCluster * kMultiplierWarps);
    }
    publish_barriers();
  }
  cluster_arrive();
  cluster_wait();
  allow_next_kernel();

  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);  // the same in all lanes for the compiler too
  if (warp == kWeightWarp) {
    copy_weights(s, weight_map, work);
    wait_for_previous_kernel();
  } else if (warp > kWeightWarp) {
    wait_for_previous_kernel();
    fence_tile_copies();
    copy_x(s, x_map, work);
  } else {
    wait_for_previous_kernel();
    Multiplier<T>(s, out_map).run(work);
  }
}

template <typename T>
__global__ __launch_bounds__(kThreads, 1) void gated_linear_wide_kernel(
    const __grid_constant__ CUtensorMap out_map, const __grid_constant__ CUtensorMap x_map,
    const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ Work work) {
  if constexpr (kHopperCode) run_gated_linear<T>(out_map, x_map, weight_map, work);
}

}  // namespace

cudaError_t gated_linear_wide(void* out, const void* x, const void* weight, int num_rows, int out_features,
                              int in_features, Dtype dtype, cudaStream_t stream) {
  constexpr int max_int = std::numeric_limits<int>::max();
  const bool supported = num_rows >= 1 && num_rows <= max_int - kCluster * kTokens && out_features > 0 &&
                         out_features % 8 == 0 && out_features <= max_int / 4 && in_features > 0 &&
                         in_features % 8 == 0 && is_aligned16(out) && is_aligned16(x) && is_aligned16(weight);
  if (!supported) return cudaErrorInvalidValue;
  Work work{};
  work.num_features = out_features;
  work.num_chunks = ceil_div(in_features, kTileColumns);
  work.token_pairs = ceil_div(num_rows, kCluster * kTokens);
  work.feature_tiles = ceil_div(out_features, kFeatures);
  const int64_t num_tiles = static_cast<int64_t>(work.token_pairs) * work.feature_tiles;
  if (num_tiles > max_int / 2) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (device_attribute(cudaDevAttrComputeCapabilityMajor, 0) != 9) return cudaErrorNotSupported;
    CUtensorMap out_map, x_map, weight_map;
    cudaError_t error = describe_matrix(&out_map, out, num_rows, out_features, kStoreRows);
    if (error == cudaSuccess) error = describe_matrix(&x_map, x, num_rows, in_features, kTokens);
    if (error == cudaSuccess) error = describe_matrix(&weight_map, weight, 2 * out_features, in_features, kFeatures);
    if (error != cudaSuccess) return error;
    const int64_t clusters = std::min<int64_t>(num_tiles, device_attribute(cudaDevAttrMultiProcessorCount, 2) / kCluster);
    return launch_clusters(gated_linear_wide_kernel<T>, static_cast<unsigned>(clusters) * kCluster, kThreads, kCluster,
                           sizeof(Shared), stream, out_map, x_map, weight_map, work);
  });
}

}  // namespace tinyvllm
