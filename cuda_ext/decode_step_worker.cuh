// The multiplying warps of decode_step: how they go through the stages of a step, and what begins it.
#pragma once

#include "decode_step_end.cuh"
#include "decode_step_finish.cuh"
#include "decode_step_merge.cuh"

namespace tinyvllm {

// By the first threads of the multiplying warps.
template <typename T, int head_dim>
__device__ void read_rows(const StepArguments<T>& a, StepShared& s) {
  const StepHeader* header = reinterpret_cast<const StepHeader*>(a.workspace);
  const int i = threadIdx.x;
  s.best[i] = 0;
  if (i < a.num_rows) {
    const int row = a.rows[i];
    const int position = row >= 0 ? a.next_positions[i] : -1;
    const int length = position + 1;
    const int column = position / a.block_size;
    s.token[i] = row >= 0 ? a.last_tokens[row] : 0;
    s.cache_offset[i] = -1;
    if (row >= 0 && column < a.table_stride) {
      const int64_t block = a.block_table[static_cast<int64_t>(row) * a.table_stride + column];
      s.cache_offset[i] = (block * a.num_kv_heads * 2 * a.block_size + position % a.block_size) * head_dim;
    }
    const int num_tiles = ceil_div(length, kTileTokens);
    const int wanted = max(min(ceil_div(length, kSplitTokens), a.max_splits), 1);
    const int tiles_per_split = max(ceil_div(num_tiles, wanted), 1);
    s.row[i] = row;
    s.scale[i] = a.temperature != nullptr && row >= 0 ? scale_of(a.temperature[row]) : 0.0f;
    s.length[i] = length;
    s.tiles_per_split[i] = tiles_per_split;
    s.num_splits[i] = max(ceil_div(num_tiles, tiles_per_split), 1);
  }
  if (i == kMaxStepRows) s.steps = header->steps;
  named_barrier(1, kStepThreads);
  if (i == 0) {
    s.most_splits = 1;
    s.draws = 0;
    for (int j = 0; j < a.num_rows; ++j) {
      s.most_splits = max(s.most_splits, s.num_splits[j]);
      s.draws |= s.scale[j] > 0.0f;
    }
  }
  named_barrier(1, kStepThreads);
}

template <typename T>
__device__ void make_holes(const StepArguments<T>& a, int set) {
  const StepHeader* header = reinterpret_cast<const StepHeader*>(a.workspace);
  uint4* words = reinterpret_cast<uint4*>(a.workspace + kHeaderWords + set * a.set_words);
  const int count = header->written[set] / 4;
  for (int i = blockIdx.x * kStepThreads + threadIdx.x; i < count; i += gridDim.x * kStepThreads) {
    words[i] = make_uint4(kHole, kHole, kHole, kHole);
  }
}

template <typename T, int head_dim, int kGroups>
struct Worker {
  const StepArguments<T>& a;
  StepShared& s;
  unsigned char* ring;
  float* partials;  // of two rounds in turn: who is a round ahead writes the other
  float* attention_scratch;
  Patience patience;
  Output output;
  Turn at;
  int parity = 0;  // bit 0 of rounds, bit 1 of linear stages

  // Times of this CTA: when a stage has its input, and when it has written its output.
  __device__ void note_time(int stage, int which) const {
    if (a.times != nullptr && threadIdx.x == 0) {
      a.times[(static_cast<int64_t>(blockIdx.x) * a.num_stages + stage) * 2 + which] = nanoseconds();
    }
  }

  __device__ void run_attention(int layer, uint32_t* layer_words) {
    const int group_heads = a.num_heads / a.num_kv_heads;
    const int groups = ceil_div(group_heads, kHeadRows);
    const int num_items = s.most_splits * a.num_rows * a.num_kv_heads * groups;
    for (int i = blockIdx.x; i < num_items; i += gridDim.x) {
      const int group_head = i % groups * kHeadRows;
      const int seq = i / groups / a.num_kv_heads % a.num_rows;
      const int split = i / groups / a.num_kv_heads / a.num_rows;
      if (split >= s.num_splits[seq]) continue;
      const AttentionItem item{layer,      seq, i / groups % a.num_kv_heads,
                               group_head, min(kHeadRows, group_heads - group_head), split};
      named_barrier(1, kStepThreads);  // the scratch is free
      attend<T, head_dim>(a, s, layer_words, attention_scratch, item, patience);
    }
    if (s.most_splits > 1) merge_parts<T, head_dim>(a, s, layer_words, patience);
  }

  template <int stage>
  __device__ __forceinline__ void load_input(Fragments<kGroups, held_strips<kGroups>(stage)>& x, const LinearShape& l,
                                             int layer, const uint32_t* layer_words, int first_strip) {
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
      load_strips(x, rows, l, first_strip, patience);
    } else {
      const NormWeights norm = load_norm(stage == kLogits ? a.final_norm
                                         : stage == kQkv  ? a.layers[layer].attention_norm
                                                          : a.layers[layer].mlp_norm,
                                         l);
      load_strips(x, rows, l, 0, patience);
      weigh<T, kGroups>(x, norm, l.num_strips, s.squares[parity / 2][threadIdx.x / kWarpSize]);
    }
  }

  template <int stage>
  __device__ __forceinline__ void run_linear(int layer, int number, uint32_t* layer_words) {
    constexpr int held = held_strips<kGroups>(stage);
    constexpr bool loads_once = stage != kO && stage != kDown;  // all strips are held
    const LinearShape& l = a.shapes[stage];
    const Share share = share_of(l.num_tiles, layer);
    if (share.count == 0) return;
    Operand operand =
        prepare_output<T, head_dim, stage>(a, s, output, layer, layer_words, share.first, min(kRoundTiles, share.count));
    Fragments<kGroups, held> x;
    if constexpr (loads_once) {
      load_input<stage>(x, l, layer, layer_words, 0);
      note_time(number, 0);
    }
    for (int round = 0; round < share.count; round += kRoundTiles) {
      const int first_tile = share.first + round;
      const int num_tiles = min(kRoundTiles, share.count - round);
      float* partial = partials + parity % 2 * kRoundTiles * tile_partials(a.num_rows);
      if (round > 0) {
        operand = prepare_output<T, head_dim, stage>(a, s, output, layer, layer_words, first_tile, num_tiles);
      }
      for (int strip = 0; strip < l.num_strips; strip += held) {
        if constexpr (!loads_once) {
          load_input<stage>(x, l, layer, layer_words, strip);
          if (round == 0 && strip == 0) note_time(number, 0);
        }
        multiply_tiles<T, kGroups, held>(x, l, strip, num_tiles, ring, at, a.ring_tiles, s, partial, a.num_rows,
                                         patience);
      }
      named_barrier(1, kStepThreads);
      finish_output<T, head_dim, stage>(a, s, output, operand, layer, layer_words, first_tile, num_tiles, partial,
                                        s.squares[parity / 2], patience);
      parity ^= 1;
    }
    parity ^= 2;
  }

  __device__ void run() {
    read_rows<T, head_dim>(a, s);
    const int set = s.steps % 2;
    make_holes(a, set ^ 1);
    uint32_t* words = a.workspace + kHeaderWords + set * a.set_words;
    for (int number = 0; number < a.num_stages; ++number) {
      const int layer = number / kStagesPerLayer;
      const int stage = layer == a.num_layers ? static_cast<int>(kLogits) : number % kStagesPerLayer;
      uint32_t* layer_words = words + layer * a.exchange.layer_words;
      patience.stage = number;
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
    end_step(a, s, patience);
  }
};

}  // namespace tinyvllm
