// The linear layers of decode_step: eight warps multiply each tile that the stream brings, every one its chunks of K.
//
// A chunk of a tile is 8 rows x 64 elements. Tensor cores take it as 16 rows of 32, the second 8 being the other halves
// of the chunk's rows: the right operand has a column for each half of each row of x, so that 4 rows of x fill its 8
// columns, and of the result [weight row and half, x row and half] only equal halves are kept and added. Even rows have
// their first half first, odd ones their second, so that 16-byte reads of two rows meet no bank conflict.
#pragma once

#include "decode_step_input.cuh"

namespace tinyvllm {

// What a lane has of a warp's chunks of a strip of a tile: first and second operand rows.
struct Pieces {
  uint4 first[kSteps], second[kSteps];
};

// Waits until the tile whose turn it is has landed, reads this warp's share and frees the slot.
__device__ __forceinline__ void take_pieces(Pieces& pieces, const unsigned char* ring, Turn& at, int ring_tiles,
                                            StepShared& s, const Patience& patience) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const unsigned char* row =
      ring + at.slot * kTileBytes + lane / 4 * kRowBytes + warp * (kChunk * 2) + lane % 4 * 16;
  const int swap = lane / 4 % 2 * kChunk;
  const bool first_landed = has_ended(shared_address(&s.full[at.slot][0]), at.parity);
  const bool second_landed = has_ended(shared_address(&s.full[at.slot][1]), at.parity);
  if (!second_landed) wait_for(&s.full[at.slot][1], at.parity, patience);
  if (!first_landed) wait_for(&s.full[at.slot][0], at.parity, patience);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    pieces.first[step] = load16(row + step * (kStepWarps * kChunk * 2) + swap);
    pieces.second[step] = load16(row + step * (kStepWarps * kChunk * 2) + (kChunk - swap));
  }
  __syncwarp();
  if (lane == 0) arrive(shared_address(&s.empty[at.slot]));
  at.advance(ring_tiles);
}

// sums[group] += a strip's pieces times x. Chunks behind the strip's end, which no copy fills, meet zeros of x; the ring
// has only finite numbers.
template <typename T, int kGroups, int kHeld>
__device__ __forceinline__ void multiply_strip(float (&sums)[kGroups][2][4], const Fragments<kGroups, kHeld>& x,
                                               int strip, const Pieces& pieces) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const uint4 a = pieces.first[step], b = pieces.second[step], right = x.v[group][strip][step];
      mma_16x8x16<T>(sums[group][0], {a.x, b.x, a.y, b.y}, {right.x, right.y});
      mma_16x8x16<T>(sums[group][1], {a.z, b.z, a.w, b.w}, {right.z, right.w});
    }
  }
}

// Floats of a tile's partial sums, [warp][row of x][weight row], and some more against bank conflicts.
__host__ __device__ constexpr int tile_partials(int num_rows) { return kStepWarps * num_rows * kTileRows + kTileRows; }

// A tile's part of `partial` = or += this warp's share.
template <int kGroups>
__device__ __forceinline__ void put_sums(const float (&sums)[kGroups][2][4], float* partial, int num_rows, bool adds) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int row = 4 * group + lane % 4;
    if (row < num_rows) {
      float& target = partial[(warp * num_rows + row) * kTileRows + lane / 4];
      const float(&x)[4] = sums[group][0];
      const float(&y)[4] = sums[group][1];
      const float sum = lane / 4 % 2 == 0 ? x[0] + y[0] + (x[3] + y[3]) : x[1] + y[1] + (x[2] + y[2]);
      target = adds ? target + sum : sum;
    }
  }
}

// The stages that find the ring full because attention and its exchanges took long, where there are registers for it.
template <int kGroups, int kNormStrips>
__host__ __device__ constexpr int held_tiles(int stage) {
  if (kGroups * kNormStrips == 4) return 0;
  return stage == kO ? 2 / kNormStrips : stage == kGateUp ? 3 / kNormStrips : 0;
}

// Tiles whose pieces a warp takes out of the ring before it has x, so that the stream goes on meanwhile.
template <int kTiles, int kStrips>
struct HeldTiles {
  Pieces pieces[kTiles > 0 ? kTiles : 1][kStrips];
  int count;

  __device__ __forceinline__ HeldTiles(int num_tiles, const unsigned char* ring, Turn& at, int ring_tiles,
                                       StepShared& s, const Patience& patience)
      : count(min(num_tiles, kTiles)) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        if (tile < count) {
          take_pieces(pieces[tile][strip], ring, at, ring_tiles, s, patience);
        } else {
          pieces[tile][strip] = {};
        }
      }
    }
  }

  template <typename T, int kGroups>
  __device__ __forceinline__ void multiply(const Fragments<kGroups, kStrips>& x, float* partial, int num_rows) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float sums[kGroups][2][4] = {};
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) multiply_strip<T, kGroups>(sums, x, strip, pieces[tile][strip]);
      if (tile < count) put_sums<kGroups>(sums, partial + tile * tile_partials(num_rows), num_rows, false);
    }
  }
};

// Multiplies tiles first_tile ... of a round with the strips of x that are held: partial = or += this warp's share.
template <typename T, int kGroups, int kHeld>
__device__ __forceinline__ void multiply_tiles(const Fragments<kGroups, kHeld>& x, const LinearShape& l,
                                               int first_strip, int first_tile, int num_tiles,
                                               const unsigned char* ring, Turn& at, int ring_tiles, StepShared& s,
                                               float* partial, int num_rows, const Patience& patience) {
#pragma unroll 1
  for (int tile = first_tile; tile < num_tiles; ++tile) {
    float sums[kGroups][2][4] = {};
#pragma unroll
    for (int strip = 0; strip < kHeld; ++strip) {
      if (first_strip + strip >= l.num_strips) break;
      Pieces pieces;
      take_pieces(pieces, ring, at, ring_tiles, s, patience);
      multiply_strip<T, kGroups>(sums, x, strip, pieces);
    }
    put_sums<kGroups>(sums, partial + tile * tile_partials(num_rows), num_rows, first_strip != 0);
  }
}

}  // namespace tinyvllm
