// The linear layers of decode_step: one warp streams this CTA's tiles of all weights through a ring in shared memory,
// whatever the others do; eight warps multiply each tile, every one its chunks of K.
//
// A chunk of a tile is 8 rows x 64 elements. Tensor cores take it as 16 rows of 32, the second 8 being the second halves
// of the chunk's rows: the right operand has a column for each half of each row of x, so that 4 rows of x fill its 8
// columns, and of the result [weight row and half, x row and half] only equal halves are kept and added.
#pragma once

#include "decode_step.cuh"

namespace tinyvllm {

// Strips of x that are held in registers at once.
constexpr int kNormStrips = 2;
template <int kGroups>
constexpr int kMostStrips = 4 / kGroups;

template <int kGroups>
__host__ __device__ constexpr int held_strips(int stage) {
  return stage == kDown ? kMostStrips<kGroups> : kNormStrips;
}

// ---- The streaming warp: its first lanes copy a row each ----

template <typename T, int head_dim, int kGroups>
struct WeightStream {
  const StepArguments<T>& a;
  StepShared& s;
  unsigned char* ring;
  Patience patience;
  uint64_t policy;
  int lane;
  Turn at, landed;
  int landed_half = 0;
  int issued = 0;
  bool first_lap = true;

  // The next half of a tile in flight, once few enough are.
  __device__ void copy_half(const T* weight, const LinearShape& l, int row, int half, int first, int elements) {
    if (issued >= kCopiesInFlight) {
      wait_for(&s.full[landed.slot][landed_half], landed.parity, patience);
      landed_half ^= 1;
      if (landed_half == 0) landed.advance(a.ring_tiles);
    }
    const int num_rows = max(min(kHalfRows, l.out_features - row), 0);
    const uint32_t bytes = elements * sizeof(T);
    uint64_t* barrier = &s.full[at.slot][half];
    if (lane == 0) arrive_expecting(shared_address(barrier), num_rows * bytes);
    __syncwarp();
    if (lane < num_rows) {
      bulk_copy(ring + at.slot * kTileBytes + (half * kHalfRows + lane) * kPitch,
                weight + static_cast<int64_t>(row + lane) * l.in_features + first, bytes, barrier, policy);
    }
    ++issued;
  }

  __device__ void run_layer(int layer, int stage) {
    const LinearShape& l = a.shapes[stage];
    const LayerPointers<T>& pointers = a.layers[min(layer, a.num_layers - 1)];
    const T* weight = stage == kQkv      ? pointers.qkv
                      : stage == kO      ? pointers.o
                      : stage == kGateUp ? pointers.gate_up
                      : stage == kDown   ? pointers.down
                                         : a.lm_head;
    const Share share = share_of(l.num_tiles, layer);
    const int held = held_strips<kGroups>(stage);
    for (int round = 0; round < share.count; round += kRoundTiles) {
      const int end = min(round + kRoundTiles, share.count);
      for (int strips = 0; strips < l.num_strips; strips += held) {
        for (int tile = round; tile < end; ++tile) {
          for (int strip = strips; strip < min(strips + held, l.num_strips); ++strip) {
            if (!first_lap) wait_for(&s.empty[at.slot], at.parity ^ 1, patience);
            if (s.deadline == 0) return;
            const int first = strip * l.strip;
            const int elements = min(l.strip, l.in_features - first);
            for (int half = 0; half < 2; ++half) {
              const int row = first_row<head_dim>(stage, share.first + tile, half, a.intermediate_size);
              copy_half(weight, l, row, half, first, elements);
            }
            at.advance(a.ring_tiles);
            first_lap = first_lap && at.slot != 0;
          }
        }
      }
    }
  }

  __device__ void run() {
    for (int stage = 0; stage < a.num_stages; ++stage) {
      const int layer = stage / kStagesPerLayer;
      patience.stage = stage;
      const int kind = layer == a.num_layers ? kLogits : stage % kStagesPerLayer;
      if (kind != kAttention) run_layer(layer, kind);
    }
    for (int left = min(issued, kCopiesInFlight); left > 0; --left) {  // nothing may land after the CTA's end
      wait_for(&s.full[landed.slot][landed_half], landed.parity, patience);
      landed_half ^= 1;
      if (landed_half == 0) landed.advance(a.ring_tiles);
    }
  }
};

// ---- The multiplying warps ----

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

// Reads strips first_strip ... of rows of x, complete when it returns; a null row gives zeros.
template <typename T, int kGroups, int kHeld>
__device__ __forceinline__ void load_strips(Fragments<kGroups, kHeld>& x, const T* const (&rows)[kGroups],
                                            const LinearShape& l, int first_strip, const Patience& patience) {
  const auto for_each = [&](auto&& action) {
#pragma unroll
    for (int strip = 0; strip < kHeld; ++strip) {
      if (strip > 0 && first_strip + strip >= l.num_strips) break;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) action(x.v[group][strip][step], group, strip, step);
      }
    }
  };
#pragma unroll
  for (int strip = 1; strip < kHeld; ++strip) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) x.v[group][strip][step] = make_uint4(0, 0, 0, 0);
    }
  }
  for_each([&](uint4& v, int group, int strip, int step) {
    const int in_strip = lane_element(step);
    const int element = (first_strip + strip) * l.strip + in_strip;
    const bool real = rows[group] != nullptr && in_strip < l.strip && element < l.in_features;
    const uint32_t word = real ? kHole : 0;
    v = make_uint4(word, word, word, word);
  });
#pragma unroll 1
  for (bool holes = true; holes;) {
    for_each([&](uint4& v, int group, int strip, int step) {
      if (has_hole(v)) v = load16_relaxed(rows[group] + (first_strip + strip) * l.strip + lane_element(step));
    });
    holes = false;
    for_each([&](const uint4& v, int, int, int) { holes |= has_hole(v); });
    holes = __any_sync(kAllLanes, holes) && !patience.is_over();
  }
}

// The norm's weights of the lane's elements.
struct NormWeights {
  uint4 v[kNormStrips][kSteps];
};

template <typename T>
__device__ __forceinline__ NormWeights load_norm(const T* weight, const LinearShape& l) {
  NormWeights norm;
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

// x *= norm's weights; the root mean square is divided out of the products. squares[row] = the warp's sum of x^2.
template <typename T, int kGroups>
__device__ __forceinline__ void weigh(Fragments<kGroups, kNormStrips>& x, const NormWeights& norm, int num_strips,
                                      float (&squares)[kMaxStepRows]) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float sum = 0.0f;
#pragma unroll
    for (int strip = 0; strip < kNormStrips; ++strip) {
      if (strip >= num_strips) break;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        float value[8], weight[8];
        unpack8<T>(x.v[group][strip][step], value);
        unpack8<T>(norm.v[strip][step], weight);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum += value[i] * value[i];
          value[i] *= weight[i];
        }
        x.v[group][strip][step] = pack8<T>(value);
      }
    }
    sum = warp_sum<8>(sum);
    const int lane = threadIdx.x % kWarpSize;
    if (lane % 8 == 0) squares[4 * group + lane / 8] = sum;
  }
}

// sums[group] += the warp's chunks of a strip, at `mine` for this lane, times x. Chunks behind the strip's end, which no
// copy fills, meet zeros of x; the ring has only finite numbers.
template <typename T, int kGroups, int kHeld>
__device__ __forceinline__ void multiply_strip(float (&sums)[kGroups][2][4], const Fragments<kGroups, kHeld>& x,
                                               int strip, const unsigned char* mine) {
  uint4 low[kSteps], high[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    low[step] = load16(mine + step * (kStepWarps * kChunk * 2));
    high[step] = load16(mine + step * (kStepWarps * kChunk * 2) + kChunk);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const uint4 a = low[step], b = high[step], right = x.v[group][strip][step];
      mma_16x8x16<T>(sums[group][0], {a.x, b.x, a.y, b.y}, {right.x, right.y});
      mma_16x8x16<T>(sums[group][1], {a.z, b.z, a.w, b.w}, {right.z, right.w});
    }
  }
}

// Floats of a tile's partial sums, [warp][row of x][weight row], and some more against bank conflicts.
__host__ __device__ constexpr int tile_partials(int num_rows) { return kStepWarps * num_rows * kTileRows + kTileRows; }

// Multiplies the tiles of a round with the strips of x that are held: partial = or += this warp's share.
template <typename T, int kGroups, int kHeld>
__device__ __forceinline__ void multiply_tiles(const Fragments<kGroups, kHeld>& x, const LinearShape& l, int first_strip,
                                               int num_tiles, const unsigned char* ring, Turn& at,
                                               int ring_tiles, StepShared& s, float* partial, int num_rows,
                                               const Patience& patience) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const unsigned char* mine = ring + lane / 4 * kPitch + warp * (kChunk * 2) + lane % 4 * 16;
#pragma unroll 1
  for (int tile = 0; tile < num_tiles; ++tile) {
    float sums[kGroups][2][4] = {};
#pragma unroll
    for (int strip = 0; strip < kHeld; ++strip) {
      if (first_strip + strip >= l.num_strips) break;
      const bool first_landed = has_ended(shared_address(&s.full[at.slot][0]), at.parity);
      const bool second_landed = has_ended(shared_address(&s.full[at.slot][1]), at.parity);
      if (!second_landed) wait_for(&s.full[at.slot][1], at.parity, patience);
      if (!first_landed) wait_for(&s.full[at.slot][0], at.parity, patience);
      multiply_strip<T, kGroups, kHeld>(sums, x, strip, mine + at.slot * kTileBytes);
      __syncwarp();
      if (lane == 0) arrive(shared_address(&s.empty[at.slot]));
      at.advance(ring_tiles);
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int row = 4 * group + lane % 4;
      if (row < num_rows) {
        float& target = partial[tile * tile_partials(num_rows) + (warp * num_rows + row) * kTileRows + lane / 4];
        const float sum = sums[group][0][0] + sums[group][1][0] + (sums[group][0][3] + sums[group][1][3]);
        target = first_strip == 0 ? sum : target + sum;
      }
    }
  }
}

}  // namespace tinyvllm
