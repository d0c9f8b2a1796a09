// What linear_hopper, add_linear_hopper and argmax_linear_hopper share: how CTAs share the work, the ring of tiles and the
// warps that fill it, and the products.
#pragma once

#include "wgmma.cuh"

namespace tinyvllm {

constexpr int kMaxRows = 128;
constexpr int kConsumerWarps = 8;                     // two warpgroups
constexpr int kConsumers = kConsumerWarps * kWarpSize;
constexpr int kWeightWarp = kConsumerWarps;           // its first lane issues the copies of weights,
constexpr int kThreads = kConsumers + 2 * kWarpSize;  // that of the last warp the copies of x
constexpr int kGroupFeatures = 64;                    // rows of weight that a warpgroup multiplies
constexpr int kUnitRows = 2 * kGroupFeatures;         // rows of weight of a CTA
constexpr int kWeightTileBytes = kGroupFeatures * kTileRowBytes;
constexpr int kMaxSlots = 12;
constexpr int kBytesInFlight = 64 * 1024;             // of weights for a CTA; more would only delay the other accesses

// How the CTAs share the weights: a unit is 128 rows of weight, when gated 64 of gate and the 64 of up that go with them.
// A cluster takes unit i, then those num_clusters further. Its CTAs split the chunks (64 elements of K), and when
// halves is 2 also the rows of x: two with the same chunks then copy half of the weights each, to both.
struct Layout {
  int num_clusters, splits, halves;
  int num_units, num_chunks;

  __host__ __device__ int cluster_size() const { return splits * halves; }
};

struct Work {
  Layout layout;
  int num_rows, out_features;
  int num_slots;                // of the ring
  int stage_at, barriers_at;    // bytes in shared memory
  bool gated, float_out;

  __host__ __device__ int unit_features() const { return gated ? kUnitRows / 2 : kUnitRows; }
};

// Of one CTA.
struct Part {
  int split, half;
  int first_chunk, end_chunk;
  int first_unit;
  int first_row, num_rows;  // of x
  int own_pieces;           // of 8 rows each: the CTAs that split K have them in turn

  __device__ explicit Part(const Work& work) {
    const Layout& layout = work.layout;
    const int rank = blockIdx.x % layout.cluster_size();
    split = rank / layout.halves;
    half = rank % layout.halves;
    first_chunk = layout.num_chunks * split / layout.splits;
    end_chunk = layout.num_chunks * (split + 1) / layout.splits;
    first_unit = blockIdx.x / layout.cluster_size();
    const int rows = ceil_div(work.num_rows, layout.halves);
    first_row = half * rows;
    num_rows = min(rows, work.num_rows - first_row);
    own_pieces = (ceil_div(num_rows, 8) - split + layout.splits - 1) / layout.splits;
  }
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
  __device__ uint32_t received() const { return barriers + 8 * 3 * num_slots; }  // partial sums of other CTAs
  static constexpr int barrier_bytes(int slots) { return 8 * (3 * slots + 1); }
};

template <int kRows>
__device__ __forceinline__ void copy_weights(const Ring<kRows>& ring, const CUtensorMap& map, const Work& work,
                                             const Part& part) {
  const Layout& layout = work.layout;
  const uint64_t policy = evict_first_policy();
  const int most = kBytesInFlight * layout.halves / (2 * kWeightTileBytes);
  const int in_flight = ring.num_slots < most ? ring.num_slots : most;
  const uint16_t pair = static_cast<uint16_t>(3 << part.split * 2);
  Turn turn, landed;
  int issued = 0;
  for (int unit = part.first_unit; unit < layout.num_units; unit += layout.num_clusters) {
    const int row = unit * kUnitRows + part.half * kGroupFeatures;
    for (int chunk = part.first_chunk; chunk < part.end_chunk; ++chunk) {
      wait_barrier(ring.empty(turn.slot), turn.parity ^ 1);
      if (issued++ >= in_flight) {
        wait_barrier(ring.weights_full(landed.slot), landed.parity);
        landed.advance(ring.num_slots);
      }
      const uint32_t full = ring.weights_full(turn.slot);
      const uint32_t target = ring.weights(turn.slot, part.half);
      const int within = work.gated ? 0 : row;
      const int group = work.gated ? row / 16 : 0;
      const int column = chunk * kTileColumns;
      arrive_expecting(full, 2 * kWeightTileBytes);
      if (layout.halves == 2) {
        copy_weight_tile_to(pair, target, map, within, group, column, full, policy);
      } else {
        copy_weight_tile(target, map, within, group, column, full, policy);
      }
      turn.advance(ring.num_slots);
    }
  }
}

template <int kRows>
__device__ __forceinline__ void copy_x(const Ring<kRows>& ring, const CUtensorMap& map, const Work& work,
                                       const Part& part) {
  Turn turn;
  for (int unit = part.first_unit; unit < work.layout.num_units; unit += work.layout.num_clusters) {
    for (int chunk = part.first_chunk; chunk < part.end_chunk; ++chunk) {
      wait_barrier(ring.empty(turn.slot), turn.parity ^ 1);
      arrive_expecting(ring.x_full(turn.slot), Ring<kRows>::kXBytes);
      copy_tile(ring.x(turn.slot), map, part.first_row, chunk * kTileColumns, ring.x_full(turn.slot));
      turn.advance(ring.num_slots);
    }
  }
}

// Tells the copying warps of this CTA, and of the other one of a pair, that a warp has read a slot. Only what they wait for:
// they must not end before they are told.
template <int kRows>
struct Release {
  uint32_t mine, other;  // the first barriers
  int left;              // slots that are filled again

  __device__ Release(const Ring<kRows>& ring, const Layout& layout, const Part& part) : mine(ring.empty(0)), other(0) {
    const int units = ceil_div(layout.num_units - part.first_unit, layout.num_clusters);
    left = units * (part.end_chunk - part.first_chunk) - ring.num_slots;
    if (layout.halves == 2) other = address_in(mine, 2 * part.split + 1 - part.half);
  }

  __device__ void operator()(int slot) {
    if (left-- <= 0) return;
    const int lane = threadIdx.x % kWarpSize;
    if (lane == 0) arrive(mine + 8 * slot);
    if (lane == 1 && other != 0) arrive_at(other + 8 * slot);
  }
};

// The warpgroup's sums of one unit.
template <typename T, int kRows>
__device__ __forceinline__ void multiply_unit(float (&sums)[kRows / 2], const Ring<kRows>& ring, Turn& turn,
                                              Release<kRows>& release, const Part& part) {
  const int group = threadIdx.x / kWarpgroup;
  int previous = -1;
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  for (int chunk = part.first_chunk; chunk < part.end_chunk; ++chunk) {
    wait_barrier(ring.weights_full(turn.slot), turn.parity);
    wait_barrier(ring.x_full(turn.slot), turn.parity);
    const uint64_t a = tile_descriptor(ring.weights(turn.slot, group));
    const uint64_t b = tile_descriptor(ring.x(turn.slot));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileColumns / 16; ++k) wgmma<T, kRows>(sums, a + 2 * k, b + 2 * k);
    wgmma_commit();
    wgmma_wait<1>();  // the slot before is read
    if (previous >= 0) release(previous);
    previous = turn.slot;
    turn.advance(ring.num_slots);
  }
  wgmma_wait<0>();
  settle(sums);
  release(previous);
}

// Sets up the ring and runs the CTA's warps: the multiplying ones call `prepare` once the previous kernel has ended, and of
// each unit they hand their sums to `finish`. All CTAs of a cluster have read their rings by then.
template <typename T, int kRows, typename Prepare, typename Finish>
__device__ __forceinline__ void multiply_units(const Ring<kRows>& ring, const CUtensorMap& x_map,
                                               const CUtensorMap& weight_map, const Work& work, const Part& part,
                                               const Prepare& prepare, const Finish& finish) {
  const Layout& layout = work.layout;
  const bool alone = layout.cluster_size() == 1;
  const int warp = threadIdx.x / kWarpSize;
  const bool leads = threadIdx.x % kWarpSize == 0;
  const auto meet_cluster = [&] {
    if (alone) return;
    cluster_arrive();
    cluster_wait();
  };

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < ring.num_slots; ++slot) {
      init_barrier(ring.weights_full(slot), 1);
      init_barrier(ring.x_full(slot), 1);
      init_barrier(ring.empty(slot), kConsumerWarps * layout.halves);
    }
    init_barrier(ring.received(), 1);
    publish_barriers();
  }
  __syncthreads();
  meet_cluster();
  allow_next_kernel();

  if (warp == kWeightWarp) {
    if (leads) copy_weights(ring, weight_map, work, part);
    __syncwarp();
    wait_for_previous_kernel();
    meet_cluster();
  } else if (warp > kWeightWarp) {
    wait_for_previous_kernel();
    fence_tile_copies();
    if (leads) copy_x(ring, x_map, work, part);
    __syncwarp();
    meet_cluster();
  } else {
    wait_for_previous_kernel();
    prepare();
    Turn turn;
    Release<kRows> release(ring, layout, part);
    float sums[kRows / 2];
    for (int unit = part.first_unit; unit < layout.num_units; unit += layout.num_clusters) {
      multiply_unit<T, kRows>(sums, ring, turn, release, part);
      meet_cluster();  // a cluster has one unit only
      finish(unit, sums);
    }
  }
}

// ---- Host ----

inline int shared_limit() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, 0); }

// Divides shared memory among the ring, its barriers and stage_bytes for the way out. Returns its size.
template <int kRows>
int place_ring(Work* work, int stage_bytes) {
  const Layout& layout = work->layout;
  const int room = shared_limit() - stage_bytes - Ring<kRows>::barrier_bytes(kMaxSlots);
  const int useful = ceil_div(layout.num_chunks, layout.splits) * ceil_div(layout.num_units, layout.num_clusters);
  const int fitting = room / Ring<kRows>::kSlotBytes;
  work->num_slots = fitting < useful ? fitting : useful;
  work->num_slots = work->num_slots < kMaxSlots ? work->num_slots : kMaxSlots;
  return work->num_slots * Ring<kRows>::kSlotBytes;
}

template <int kRows>
cudaError_t describe_operands(CUtensorMap* x_map, CUtensorMap* weight_map, const void* x, const void* weight,
                              const Work& work, int in_features) {
  const cudaError_t error = describe_matrix(x_map, x, work.num_rows, in_features, kRows);
  if (error != cudaSuccess) return error;
  return describe_weights(weight_map, weight, work.gated ? 2 * work.out_features : work.out_features, in_features,
                          work.gated, kUnitRows / work.layout.halves);
}

inline bool is_supported(const void* x, const void* weight, int num_rows, int out_features, int in_features) {
  return num_rows >= 1 && num_rows <= kMaxRows && can_copy_tiles(x, weight, out_features, in_features);
}

// Calls launch(std::integral_constant<int, r>{}), r being num_rows rounded up to one of these.
template <int kRows, int... kMore, typename Launch>
cudaError_t dispatch_rows(int num_rows, const Launch& launch) {
  if constexpr (sizeof...(kMore) > 0) {
    if (num_rows > kRows) return dispatch_rows<kMore...>(num_rows, launch);
  }
  return launch(std::integral_constant<int, kRows>{});
}

}  // namespace tinyvllm
