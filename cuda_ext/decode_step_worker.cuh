// The multiplying warps of decode_step: how they go through the stages of a step, and what begins it.
#pragma once

#include "decode_step_end.cuh"
#include "decode_step_finish.cuh"
#include "decode_step_merge.cuh"

namespace tinyvllm {

// All multiplying threads call it, and the first warp reads.
template <typename T, int head_dim>
__device__ void read_rows(const StepArguments<T>& a, StepShared& s) {
  const StepHeader* header = reinterpret_cast<const StepHeader*>(a.workspace);
  const int i = threadIdx.x;
  if (i < kWarpSize) {
    int num_splits = 1;
    float scale = 0.0f;
    if (i < a.num_rows) {
      const int row = a.rows[i];
      const int position = row >= 0 ? a.next_positions[i] : -1;
      const int length = position + 1;
      const int column = a.by_block_size.quotient(max(position, 0));
      s.token[i] = row >= 0 ? a.last_tokens[row] : 0;
      s.cache_offset[i] = -1;
      if (row >= 0 && column < a.table_stride) {
        const int64_t block = a.block_table[static_cast<int64_t>(row) * a.table_stride + column];
        s.cache_offset[i] = (block * a.num_kv_heads * 2 * a.block_size + position - column * a.block_size) * head_dim;
      }
      const int num_tiles = ceil_div(length, kTileTokens);
      const int wanted = max(min(ceil_div(length, kSplitTokens), a.max_splits), 1);
      const int tiles_per_split = max(ceil_div(num_tiles, wanted), 1);
      num_splits = max(ceil_div(num_tiles, tiles_per_split), 1);
      if (a.temperature != nullptr && row >= 0) scale = scale_of(a.temperature[row]);
      s.row[i] = row;
      s.scale[i] = scale;
      s.length[i] = length;
      s.tiles_per_split[i] = tiles_per_split;
      s.num_splits[i] = num_splits;
    }
    const int most_splits = __reduce_max_sync(kAllLanes, num_splits);
    const bool draws = __any_sync(kAllLanes, scale > 0.0f);
    if (i == 0) {
      int32_t* const told = header->told;
      const int written[2] = {header->written[0], header->written[1]};
      s.steps = header->steps;
      s.told = told == nullptr ? nullptr : told + s.steps % kToldSteps * kMaxStepRows;
      s.written = s.steps % 2 == 0 ? written[1] : written[0];
      s.most_splits = most_splits;
      s.draws = draws;
    }
  }
  named_barrier(1, kStepThreads);
}

// Makes the words of the next step's set into holes that the step before the last has written.
template <typename T>
__device__ void make_holes(const StepArguments<T>& a, const StepShared& s) {
  uint4* words = reinterpret_cast<uint4*>(a.workspace + kHeaderWords + (s.steps + 1) % 2 * a.set_words);
  for (int i = blockIdx.x * kStepThreads + threadIdx.x; i < s.written / 4; i += gridDim.x * kStepThreads) {
    words[i] = make_uint4(kHole, kHole, kHole, kHole);
  }
}

template <typename T, int head_dim, int kGroups, int kNormStrips>
struct Worker {
  const StepArguments<T>& a;
  StepShared& s;
  unsigned char* ring;
  float* partials;   // of two rounds in turn: who is a round ahead writes the other
  int round_floats;  // of each
  Patience patience;
  Output output;
  Turn at;
  uint64_t best = 0;  // rank of the largest logit that the thread has seen
  int parity = 0;     // bit 0 of rounds, bit 1 of linear stages

  // Times of this CTA: when a stage has its input, and when it has written its output.
  __device__ void note_time(int stage, int which) const {
    if (a.times != nullptr && threadIdx.x == 0) {
      a.times[(static_cast<int64_t>(blockIdx.x) * a.num_stages + stage) * 2 + which] = nanoseconds();
    }
  }

  __device__ void run_attention(int layer, uint32_t* layer_words) {
    float* scratch = partials + (parity % 2 ^ 1) * round_floats;  // not the next round's
    const int num_items = s.most_splits * a.num_rows * a.num_kv_heads * a.by_head_parts.divisor;
    for (int i = blockIdx.x; i < num_items; i += gridDim.x) {
      const int of_head = a.by_head_parts.quotient(i);
      const int of_row = a.by_kv_heads.quotient(of_head);
      const int split = a.by_rows.quotient(of_row);
      const int seq = of_row - split * a.num_rows;
      if (split >= s.num_splits[seq]) continue;
      const int group_head = (i - of_head * a.by_head_parts.divisor) * kHeadRows;
      const AttentionItem item{layer,      seq, of_head - of_row * a.num_kv_heads,
                               group_head, min(kHeadRows, a.group_heads - group_head), split};
      named_barrier(1, kStepThreads);  // the scratch is free
      attend<T, head_dim>(a, s, layer_words, scratch, item, patience);
    }
    if (s.most_splits > 1) merge_parts<T, head_dim>(a, s, layer_words, patience);
  }

  template <int stage>
  __device__ __forceinline__ void load_input(Fragments<kGroups, held_strips<kGroups, kNormStrips>(stage)>& x,
                                             const LinearShape& l, int layer, const uint32_t* layer_words,
                                             int first_strip) {
    const uint32_t* words = layer_words + (stage == kO        ? a.exchange.attention
                                           : stage == kGateUp ? a.exchange.middle
                                           : stage == kDown   ? a.exchange.activation
                                                              : a.exchange.hidden - a.exchange.layer_words);
    const T* rows[kGroups];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int row = 4 * group + threadIdx.x % kWarpSize / 8;
      rows[group] = reinterpret_cast<const T*>(words) + row * l.in_features;
      if (stage == kQkv && layer == 0 && row < a.num_rows) rows[group] = embedding_of(a, s, row);
      if (row >= a.num_rows) rows[group] = nullptr;
    }
    if constexpr (stage == kO || stage == kDown) {
      load_strips(x, rows, l, first_strip, true, patience);
    } else {
      const T* weights = stage == kLogits ? a.final_norm
                         : stage == kQkv  ? a.layers[layer].attention_norm
                                          : a.layers[layer].mlp_norm;
      const NormWeights<kNormStrips> norm = load_norm<kNormStrips>(weights, l);
      load_strips(x, rows, l, 0, stage != kQkv || layer > 0, patience);
      weigh<T, kGroups>(x, norm, s.squares[parity / 2][threadIdx.x / kWarpSize]);
    }
  }

  template <int stage>
  __device__ __forceinline__ void run_linear(int layer, int number, uint32_t* layer_words) {
    constexpr int held = held_strips<kGroups, kNormStrips>(stage);
    constexpr bool loads_once = stage != kO && stage != kDown;  // all strips are held
    const LinearShape& l = a.shapes[stage];
    const Share share = share_of(a, l, layer);
    if (share.count == 0) return;
    Operand operand = prepare_output<T, head_dim, stage>(a, s, output, layer, layer_words, share.first,
                                                         min(kRoundTiles, share.count));
    const int num_held = l.num_strips == held ? share.count : 0;
    const HeldTiles<held_tiles<kGroups, kNormStrips>(stage), held> taken(num_held, ring, at, a.ring_tiles, s, patience);
    Fragments<kGroups, held> x;
    if constexpr (loads_once) {
      load_input<stage>(x, l, layer, layer_words, 0);
      note_time(number, 0);
    }
    for (int round = 0; round < share.count; round += kRoundTiles) {
      const int first_tile = share.first + round;
      const int num_tiles = min(kRoundTiles, share.count - round);
      float* partial = partials + parity % 2 * round_floats;
      if (round > 0) {
        operand = prepare_output<T, head_dim, stage>(a, s, output, layer, layer_words, first_tile, num_tiles);
      }
      for (int strip = 0; strip < l.num_strips; strip += held) {
        if constexpr (!loads_once) {
          load_input<stage>(x, l, layer, layer_words, strip);
          if (round == 0 && strip == 0) note_time(number, 0);
        }
        int taken_tiles = 0;
        if (round == 0 && strip == 0) {
          taken.template multiply<T>(x, partial, a.num_rows);
          taken_tiles = taken.count;
        }
        multiply_tiles<T, kGroups>(x, l, strip, taken_tiles, num_tiles, ring, at, a.ring_tiles, s, partial,
                                   a.num_rows, patience);
      }
      named_barrier(1, kStepThreads);
      finish_output<T, head_dim, stage>(a, s, output, operand, layer, layer_words, first_tile, num_tiles, partial,
                                        s.squares[parity / 2], best, patience);
      parity ^= 1;
    }
    parity ^= 2;
  }

  __device__ void run() {
    read_rows<T, head_dim>(a, s);
    for (int number = 0; number < a.num_stages; ++number) {
      const int layer = number / kStagesPerLayer;
      const int stage = layer == a.num_layers ? static_cast<int>(kLogits) : number % kStagesPerLayer;
      uint32_t* layer_words =
          a.workspace + kHeaderWords + s.steps % 2 * a.set_words + layer * a.exchange.layer_words;
      patience.stage = number;
      if (number == a.num_stages - 1) make_holes(a, s);  // when nothing but the stream is waited for
      switch (stage) {
        case kQkv:
          run_linear<kQkv>(layer, number, layer_words);
          break;
        case kAttention:
          run_attention(layer, layer_words);
          break;
        case kO:
          run_linear<kO>(layer, number, layer_words);
          break;
        case kGateUp:
          run_linear<kGateUp>(layer, number, layer_words);
          break;
        case kDown:
          run_linear<kDown>(layer, number, layer_words);
          break;
        default:
          run_linear<kLogits>(layer, number, layer_words);
      }
      note_time(number, 1);
    }
    end_step(a, s, best, reinterpret_cast<uint64_t*>(partials), patience);
  }
};

}  // namespace tinyvllm
