// What the linear kernels for more than 128 tokens share: how CTAs share the work, the ring of tiles and the warps that
// fill it, and the products.
//
// A CTA multiplies 64 or 128 rows of its own by columns that it may share with another CTA of its cluster; each of the
// pair copies half of them to both. Either the rows are tokens and the columns rows of weight, or the other way round:
// then a multiple of 32 tokens takes a time of its own. When there are few tiles, the CTAs of a cluster split K.
// Each warpgroup of a CTA multiplies 64 of its own rows; two warps copy.
#pragma once

#include <algorithm>
#include <limits>

#include "wgmma.cuh"

namespace tinyvllm::wide {

constexpr int kUsualOwn = 128;         // rows that a CTA has of its own
constexpr int kWarpRows = 16;          // of these
constexpr int kTokenTiles = 8;         // that go through the weights together
constexpr int kMaxBytes = 226 * 1024;  // of a CTA's shared memory

// Whether the columns are rows of weight, how many they are (a multiple of 32 up to 256), how many CTAs share them, and
// how many rows a CTA has of its own.
template <bool weights_shared, int columns, int sharers = 2, int own = kUsualOwn>
struct Form {
  static constexpr bool kWeightsShared = weights_shared;
  static constexpr int kColumns = columns;
  static constexpr int kSharers = sharers;
  static constexpr int kOwn = own;
  static constexpr int kMultiplierWarps = own / kWarpRows;
  static constexpr int kMultipliers = kMultiplierWarps * kWarpSize;
  static constexpr int kWeightWarp = kMultiplierWarps;  // the last warp copies x
  static constexpr int kThreads = kMultipliers + 2 * kWarpSize;
};

// Each slot holds a chunk of K: 64 elements. There are as many as have room in so many bytes.
template <typename Form, int bytes = kMaxBytes>
struct Ring : Form {
  using Form::kColumns;
  using Form::kOwn;
  using Form::kSharers;
  static constexpr int kSlots = bytes / ((kOwn + kColumns) * kTileRowBytes);

  uint8_t own[kSlots][kOwn * kTileRowBytes];
  uint8_t shared[kSlots][kSharers][kColumns / kSharers * kTileRowBytes];
  uint64_t full[kSlots], empty[kSlots];
  uint64_t received;  // partial sums of other CTAs
};

// How much of both a cluster takes at a time, and how far the tile of its second CTA is from that of the first.
struct Tiling {
  int tokens, features;
  int to_token, to_feature;
};

struct Work {
  int num_rows, num_features, num_chunks;
  Tiling tiling;
  int token_tiles, feature_tiles;  // of clusters
  int to_second_half;              // of what is shared, in rows
  int sharers, splits;             // of the columns, of K: the CTAs of a cluster
  bool meets;                      // a cluster has one tile, whose finish begins with cluster_barrier()
  bool paired;                     // the map of the weights
};

// Of one CTA.
struct Part {
  int cluster, num_clusters;
  int half, split;  // which one of the sharers, of the splits
  int first_chunk, end_chunk;

  __device__ explicit Part(const Work& work) {
    const int size = work.sharers * work.splits;
    cluster = blockIdx.x / size;
    num_clusters = gridDim.x / size;
    half = blockIdx.x % work.sharers;
    split = blockIdx.x % size / work.sharers;
    first_chunk = work.num_chunks * split / work.splits;
    end_chunk = work.num_chunks * (split + 1) / work.splits;
  }
};

// The tiles of a CTA, one after another. So many tokens go through all weights at a time that both stay in L2.
struct Walk {
  const Work& work;
  const Part& part;
  int index, token, feature;  // token and feature: the first ones

  __device__ Walk(const Work& w, const Part& p) : work(w), part(p), index(p.cluster) { locate(); }
  __device__ bool exists() const { return index < work.token_tiles * work.feature_tiles; }
  __device__ void advance() {
    index += part.num_clusters;
    locate();
  }
  __device__ void locate() {
    const int first_tile = index / (kTokenTiles * work.feature_tiles) * kTokenTiles;
    const int tiles = min(kTokenTiles, work.token_tiles - first_tile);
    const int rest = index - first_tile * work.feature_tiles;
    token = (first_tile + rest % tiles) * work.tiling.tokens + part.half * work.tiling.to_token;
    feature = rest / tiles * work.tiling.features + part.half * work.tiling.to_feature;
  }
};

// A warp fills every slot as it becomes free: copy(tile, chunk, slot, barrier) starts what brings `bytes`. Returns the
// next turn.
template <typename Ring, typename Copy>
__device__ __forceinline__ Turn fill_slots(Ring& ring, const Work& work, const Part& part, int bytes,
                                           const Copy& copy) {
  Turn turn;
  for (Walk tile(work, part); tile.exists(); tile.advance()) {
    for (int chunk = part.first_chunk; chunk < part.end_chunk; ++chunk) {
      const uint32_t full = shared_address(&ring.full[turn.slot]);
      wait_barrier(shared_address(&ring.empty[turn.slot]), turn.parity ^ 1);
      if (elected()) {
        arrive_expecting(full, bytes);
        copy(tile, chunk, turn.slot, full);
      }
      turn.advance(Ring::kSlots);
    }
  }
  return turn;
}

// Each of two sharers copies its half of the columns to both.
template <typename Ring>
__device__ __forceinline__ Turn fill_shared(Ring& ring, const CUtensorMap& map, const Work& work, const Part& part) {
  const uint16_t pair = static_cast<uint16_t>(3 << 2 * part.split);
  const int bytes = sizeof(ring.shared[0]);
  return fill_slots(ring, work, part, bytes, [&](const Walk& tile, int chunk, int slot, uint32_t full) {
    const int first = Ring::kWeightsShared ? tile.feature : tile.token;
    const int column = chunk * kTileColumns;
    if constexpr (Ring::kSharers == 2) {
      copy_tile_to(pair, shared_address(ring.shared[slot][part.half]), map, first + part.half * work.to_second_half,
                   column, full);
    } else {
      copy_tile(shared_address(ring.shared[slot][0]), map, first, column, full);
    }
  });
}

template <typename Ring>
__device__ __forceinline__ void copy_weights(Ring& ring, const CUtensorMap& map, const Work& work, const Part& part) {
  Turn turn;
  if constexpr (Ring::kWeightsShared) {
    turn = fill_shared(ring, map, work, part);
  } else {
    const uint64_t policy = evict_first_policy();
    const int bytes = sizeof(ring.own[0]);
    turn = fill_slots(ring, work, part, bytes, [&](const Walk& tile, int chunk, int slot, uint32_t full) {
      copy_weight_tile(shared_address(ring.own[slot]), map, work.paired ? 0 : tile.feature,
                       work.paired ? tile.feature / 8 : 0, chunk * kTileColumns, full, policy);
    });
  }
  for (int i = 0; i < Ring::kSlots; ++i) {  // until the last arrivals from the other CTA have come
    wait_barrier(shared_address(&ring.empty[turn.slot]), turn.parity ^ 1);
    turn.advance(Ring::kSlots);
  }
}

template <typename Ring>
__device__ __forceinline__ void copy_x(Ring& ring, const CUtensorMap& map, const Work& work, const Part& part) {
  if constexpr (Ring::kWeightsShared) {
    fill_slots(ring, work, part, sizeof(ring.own[0]), [&](const Walk& tile, int chunk, int slot, uint32_t full) {
      copy_tile(shared_address(ring.own[slot]), map, tile.token, chunk * kTileColumns, full);
    });
  } else {
    fill_shared(ring, map, work, part);
  }
}

// The warpgroup's sums of one tile.
template <typename T, typename Ring>
__device__ __forceinline__ void multiply(float (&sums)[Ring::kColumns / 2], Ring& ring, Turn& turn, const Part& part) {
  const int row = threadIdx.x / kWarpgroup * 64;
  const int lane = threadIdx.x % kWarpSize;
  const auto release = [&](int slot) {
    const int first = Ring::kSharers * part.split;  // rank of the sharers
    if (lane < Ring::kSharers) arrive_at(address_in(shared_address(&ring.empty[slot]), first + lane));
  };
  int previous = 0;
  for (int chunk = 0; chunk < part.end_chunk - part.first_chunk; ++chunk) {
    wait_barrier(shared_address(&ring.full[turn.slot]), turn.parity);
    const uint64_t a = tile_descriptor(shared_address(ring.own[turn.slot]) + row * kTileRowBytes);
    const uint64_t b = tile_descriptor(shared_address(ring.shared[turn.slot][0]));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileColumns / 16; ++k) wgmma<T, Ring::kColumns>(sums, a + 2 * k, b + 2 * k, chunk + k > 0);
    wgmma_commit();
    wgmma_wait<1>();  // the slot before is read
    if (chunk > 0) release(previous);
    previous = turn.slot;
    turn.advance(Ring::kSlots);
  }
  wgmma_wait<0>();
  settle(sums);
  release(previous);
}

// In wgmma's layout sums[4 j + 2 u + v] belongs to row own_row() + 8 u of a tile and column first_column() + 8 j + v.
__device__ __forceinline__ int own_row() {
  return threadIdx.x / kWarpSize * kWarpRows + threadIdx.x % kWarpSize / 4;
}
__device__ __forceinline__ int first_column() { return threadIdx.x % 4 * 2; }

struct Nothing {
  __device__ void operator()(const Walk&) const {}
};

// Sets up the ring and runs the CTA's warps: of each tile, the multiplying warps hand their sums to finish(tile, sums).
// Ahead of its products, behind the wait for the previous kernel, they call begin(tile).
template <typename T, typename Ring, typename Finish, typename Begin = Nothing>
__device__ __forceinline__ void multiply_tiles(Ring& ring, const CUtensorMap& x_map, const CUtensorMap& weight_map,
                                               const Work& work, const Part& part, const Finish& finish,
                                               const Begin& begin = {}) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < Ring::kSlots; ++i) {
      init_barrier(shared_address(&ring.full[i]), 2);
      init_barrier(shared_address(&ring.empty[i]), Ring::kSharers * Ring::kMultiplierWarps);
    }
    init_barrier(shared_address(&ring.received), 1);
    publish_barriers();
  }
  cluster_barrier();
  allow_next_kernel();

  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);  // the same in all lanes for the compiler too
  if (warp >= Ring::kWeightWarp) {
    if (warp == Ring::kWeightWarp) copy_weights(ring, weight_map, work, part);
    wait_for_previous_kernel();
    fence_tile_copies();
    if (warp > Ring::kWeightWarp) copy_x(ring, x_map, work, part);
    if (work.meets) cluster_barrier();
  } else {
    wait_for_previous_kernel();
    Turn turn;
    float sums[Ring::kColumns / 2];
    for (Walk tile(work, part); tile.exists(); tile.advance()) {
      begin(tile);
      multiply<T>(sums, ring, turn, part);
      finish(tile, sums);
    }
  }
}

// ---- Host ----

inline bool is_supported(const void* x, const void* weight, int num_rows, int out_features, int in_features) {
  return num_rows >= 1 && num_rows <= std::numeric_limits<int>::max() - 2 * kUsualOwn &&
         can_copy_tiles(x, weight, out_features, in_features);
}

// The same for an out that is written 16 bytes at a time.
inline bool is_supported(const void* x, const void* weight, int num_rows, int out_features, int in_features,
                         const void* out) {
  return is_supported(x, weight, num_rows, out_features, in_features) && out_features % 8 == 0 && is_aligned16(out);
}

// Work that is not split.
template <typename Form>
Work plan_work(int num_rows, int out_features, int in_features, bool gated) {
  const int weight_rows = Form::kWeightsShared ? Form::kColumns : Form::kOwn;  // of a CTA's tile
  const int tile_features = gated ? weight_rows / 2 : weight_rows;
  Work work{};
  work.num_rows = num_rows;
  work.num_features = out_features;
  work.num_chunks = ceil_div(in_features, kTileColumns);
  work.to_second_half = Form::kColumns / 2;
  if constexpr (Form::kWeightsShared) {
    work.tiling = {Form::kSharers * Form::kOwn, tile_features, Form::kOwn, 0};
    if (gated) work.to_second_half = out_features;
  } else {
    work.tiling = {Form::kColumns, Form::kSharers * tile_features, 0, tile_features};
    work.paired = gated;
  }
  work.token_tiles = ceil_div(num_rows, work.tiling.tokens);
  work.feature_tiles = ceil_div(out_features, work.tiling.features);
  work.sharers = Form::kSharers;
  work.splits = 1;
  return work;
}

// Describes the operands and launches kernel(arguments..., x_map, weight_map, work), with a cluster for each tile, or if
// they stay, with no more than there is room for.
template <typename Form, bool stay = true, typename Kernel, typename... Arguments>
cudaError_t launch_tiles(Kernel kernel, size_t shared_bytes, const void* x, const void* weight, int weight_rows,
                         int in_features, const Work& work, cudaStream_t stream, const Arguments&... arguments) {
  const int64_t num_tiles = static_cast<int64_t>(work.token_tiles) * work.feature_tiles;
  if (num_tiles > std::numeric_limits<int>::max() / 2) return cudaErrorInvalidValue;
  constexpr int part = Form::kColumns / Form::kSharers;
  CUtensorMap x_map, weight_map;
  cudaError_t error = describe_matrix(&x_map, x, work.num_rows, in_features, Form::kWeightsShared ? Form::kOwn : part);
  if (error == cudaSuccess) {
    error = Form::kWeightsShared ? describe_matrix(&weight_map, weight, weight_rows, in_features, part)
                                 : describe_weights(&weight_map, weight, weight_rows, in_features, work.paired,
                                                    Form::kOwn);
  }
  if (error != cudaSuccess) return error;
  const int size = Form::kSharers * work.splits;
  const int room = device_attribute(cudaDevAttrMultiProcessorCount, size) / size;
  const unsigned clusters = static_cast<unsigned>(stay ? std::min<int64_t>(num_tiles, room) : num_tiles);
  return launch_clusters(kernel, clusters * size, Form::kThreads, size, shared_bytes, stream, arguments..., x_map,
                         weight_map, work);
}

}  // namespace tinyvllm::wide
