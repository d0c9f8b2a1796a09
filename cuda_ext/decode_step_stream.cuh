// The warp of decode_step that streams this CTA's tiles of all weights through a ring in shared memory, whatever the
// others do. Its first lanes copy a row each.
#pragma once

#include "decode_step.cuh"

namespace tinyvllm {

template <typename T, int head_dim, int kGroups, int kNormStrips>
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

  // Until the oldest copy in flight has landed.
  __device__ void await_landing() {
    wait_for(&s.full[landed.slot][landed_half], landed.parity, patience);
    landed_half ^= 1;
    if (landed_half == 0) landed.advance(a.ring_tiles);
  }

  // The next half of a tile in flight, once few enough are.
  __device__ void copy_half(const T* weight, const LinearShape& l, int row, int half, int first, int elements) {
    if (issued >= kCopiesInFlight) await_landing();
    const int num_rows = max(min(kHalfRows, l.out_features - row), 0);
    const uint32_t bytes = elements * sizeof(T);
    uint64_t* barrier = &s.full[at.slot][half];
    if (lane == 0) arrive_expecting(shared_address(barrier), num_rows * bytes);
    __syncwarp();
    if (lane < num_rows) {
      bulk_copy(ring + at.slot * kTileBytes + (half * kHalfRows + lane) * kRowBytes,
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
    const Share share = share_of(a, l, layer);
    const int held = held_strips<kGroups, kNormStrips>(stage);
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
    for (int left = min(issued, kCopiesInFlight); left > 0; --left) await_landing();  // none after the CTA's end
  }
};

}  // namespace tinyvllm
