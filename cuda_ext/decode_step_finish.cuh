// What stands between the linear layers of decode_step: the attention's parts are merged where they are read, and the
// products become queries, keys and values, activations, the residual stream, or logits.
#pragma once

#include "argmax.cuh"
#include "decode_step_linear.cuh"

namespace tinyvllm {

// The lane's elements of kCount chunks of the attention's output for one row of x, merged from the parts of a split
// context by the logarithms of their sums.
template <int kCount>
struct Merged {
  float largest[kCount], weight[kCount], sum[kCount][8];
};

template <int kGroups>
constexpr int kMerged = kSteps / kGroups;
constexpr int kPartsAtOnce = 2;

// Adds parts first_part and first_part + step, where they are below num_parts, once they are complete.
template <typename T, int head_dim, int kCount>
__device__ __forceinline__ void add_parts(Merged<kCount>& m, const StepArguments<T>& a, const uint32_t* layer_words,
                                          int row, int first_part, int step, int num_parts, int first_element,
                                          int end_element, int width, const Patience& patience) {
  const T* attention = reinterpret_cast<const T*>(layer_words + a.exchange.attention);
  const uint32_t* log_sums = layer_words + a.exchange.log_sums;
  uint4 value[kPartsAtOnce][kCount];
  uint32_t log_sum[kPartsAtOnce][kCount];
#pragma unroll
  for (int p = 0; p < kPartsAtOnce; ++p) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool real = first_part + p * step < num_parts && first_element + i * kStepWarps * kChunk < end_element;
      log_sum[p][i] = real ? kHole : 0;
      value[p][i] = make_uint4(log_sum[p][i], log_sum[p][i], log_sum[p][i], log_sum[p][i]);
    }
  }
#pragma unroll 1
  for (bool holes = true; holes;) {
    holes = false;
#pragma unroll
    for (int p = 0; p < kPartsAtOnce; ++p) {
      const int64_t part = static_cast<int64_t>(first_part + p * step) * a.num_rows + row;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int element = first_element + i * kStepWarps * kChunk;
        if (has_hole(value[p][i])) value[p][i] = load16_relaxed(attention + part * width + element);
        if (log_sum[p][i] == kHole) {
          log_sum[p][i] = load4_relaxed(log_sums + part * a.num_heads + element / head_dim);
        }
      }
    }
#pragma unroll
    for (int p = 0; p < kPartsAtOnce; ++p) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) holes |= has_hole(value[p][i]) || log_sum[p][i] == kHole;
    }
    holes = __any_sync(kAllLanes, holes) && !patience.is_over();
  }
#pragma unroll
  for (int p = 0; p < kPartsAtOnce; ++p) {
    if (first_part + p * step >= num_parts) continue;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float log = __uint_as_float(log_sum[p][i]);
      const float now = fmaxf(m.largest[i], log);
      const float before = fast_exp2(m.largest[i] - now);
      const float factor = fast_exp2(log - now);
      float values[8];
      unpack8<T>(value[p][i], values);
      m.largest[i] = now;
      m.weight[i] = m.weight[i] * before + factor;
#pragma unroll
      for (int j = 0; j < 8; ++j) m.sum[i][j] = m.sum[i][j] * before + factor * values[j];
    }
  }
}

// Octets of lanes that have different rows of x; with few rows, the others take parts of the same.
__host__ __device__ constexpr int octets_with_rows(int num_rows) { return num_rows > 2 ? 4 : num_rows; }

// Reads strips of the attention's output as load_strips does.
template <typename T, int head_dim, int kGroups>
__device__ __forceinline__ void load_attention(Fragments<kGroups, kNormStrips>& x, const StepArguments<T>& a,
                                               const StepShared& s, const uint32_t* layer_words, const LinearShape& l,
                                               int first_strip, const Patience& patience) {
  constexpr int count = kMerged<kGroups>;
  const int octet = threadIdx.x % kWarpSize / 8;
  const int spread = kGroups == 2 ? 4 : octets_with_rows(a.num_rows);
  const int step_parts = 4 / spread;
#pragma unroll
  for (int strip = 0; strip < kNormStrips; ++strip) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) x.v[group][strip][step] = make_uint4(0, 0, 0, 0);
    }
    if (first_strip + strip >= l.num_strips) continue;
    const int first = (first_strip + strip) * l.strip;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int row = 4 * group + octet % spread;
      const int num_parts = row < a.num_rows ? s.num_splits[row] : 0;
#pragma unroll
      for (int step = 0; step < kSteps; step += count) {
        Merged<count> m{};
#pragma unroll
        for (float& largest : m.largest) largest = -1e30f;
#pragma unroll 1
        for (int part = 0; part < s.most_splits; part += kPartsAtOnce * step_parts) {
          add_parts<T, head_dim>(m, a, layer_words, row, part + octet / spread, step_parts, num_parts,
                                 first + lane_element(step), min(first + l.strip, l.in_features), l.in_features,
                                 patience);
        }
#pragma unroll
        for (int i = 0; i < count; ++i) {
#pragma unroll 1
          for (int offset = 8 * spread; offset < kWarpSize; offset *= 2) {
            const float other = __shfl_xor_sync(kAllLanes, m.largest[i], offset);
            const float now = fmaxf(m.largest[i], other);
            const float mine = fast_exp2(m.largest[i] - now);
            const float theirs = fast_exp2(other - now);
            m.largest[i] = now;
            m.weight[i] = m.weight[i] * mine + __shfl_xor_sync(kAllLanes, m.weight[i], offset) * theirs;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              m.sum[i][j] = m.sum[i][j] * mine + __shfl_xor_sync(kAllLanes, m.sum[i][j], offset) * theirs;
            }
          }
          const float scale = octet < spread && m.weight[i] > 0.0f ? 1.0f / m.weight[i] : 0.0f;
#pragma unroll
          for (int j = 0; j < 8; ++j) m.sum[i][j] *= scale;
          x.v[group][strip][step + i] = pack8<T>(m.sum[i]);
        }
      }
    }
  }
}

// Which two features of a tile a thread finishes, for one row of x.
struct Output {
  int in_round;  // the tile's number in its round
  int row;

  __device__ explicit Output(int num_rows) : in_round(threadIdx.x / (4 * num_rows)), row(threadIdx.x / 4 % num_rows) {}

  // Of 4: features `part` and `part + 4` where halves are pairs, else 2 part and 2 part + 1.
  __device__ int part() const { return threadIdx.x % 4; }
};

// What it takes beside the products: the residual stream's word, or cosine and sine.
struct Operand {
  const uint32_t* residual_at = nullptr;
  uint32_t residual = 0;
  float cosine = 1.0f, sine = 0.0f;
};

template <typename T>
__device__ __forceinline__ const T* embedding_of(const StepArguments<T>& a, const StepShared& s, int row) {
  const int token = s.token[row];
  return token >= 0 && token < a.vocab_size ? a.embed + static_cast<int64_t>(token) * a.hidden_size : nullptr;
}

// Called before the products are waited for, so that its loads take no time of their own.
template <typename T, int head_dim, int stage>
__device__ __forceinline__ Operand prepare_output(const StepArguments<T>& a, const StepShared& s, const Output& o,
                                                  int layer, const uint32_t* layer_words, int first_tile,
                                                  int num_tiles) {
  const int tile = first_tile + o.in_round;
  Operand operand;
  if (o.in_round >= num_tiles) return operand;
  if constexpr (stage == kQkv) {
    constexpr int head_tiles = head_dim / kTileRows;
    if (tile / head_tiles < a.num_heads + a.num_kv_heads) {
      const float* angles = a.rope_table + static_cast<int64_t>(max(s.length[o.row] - 1, 0)) * head_dim +
                            tile % head_tiles * kHalfRows + o.part();
      operand.cosine = angles[0];
      operand.sine = angles[head_dim / 2];
    }
  } else if constexpr (stage == kO || stage == kDown) {
    const int word = (o.row * a.hidden_size + tile * kTileRows) / 2 + o.part();
    if (stage == kO && layer == 0) {
      const T* row = embedding_of(a, s, o.row);
      if (row != nullptr) operand.residual = load4_relaxed(row + tile * kTileRows + 2 * o.part());
    } else {
      operand.residual_at = stage == kDown ? layer_words + a.exchange.middle + word
                                           : layer_words - a.exchange.layer_words + a.exchange.hidden + word;
      operand.residual = load4_relaxed(operand.residual_at);
    }
  }
  return operand;
}

// All multiplying threads call it; `partial` holds the round's products, `squares` the sums of squares of x if the layer
// is behind a norm.
template <typename T, int head_dim, int stage>
__device__ __forceinline__ void finish_output(const StepArguments<T>& a, StepShared& s, const Output& o,
                                              const Operand& operand, int layer, uint32_t* layer_words, int first_tile, int num_tiles,
                                              const float* partial,
                                              const float (&squares)[kStepWarps][kMaxStepRows],
                                              const Patience& patience) {
  const int tile = first_tile + o.in_round;
  const int part = o.part();
  const bool real = o.in_round < num_tiles;
  constexpr bool halves = stage == kQkv || stage == kGateUp;
  const float* products = partial + (real ? o.in_round : 0) * tile_partials(a.num_rows) + o.row * kTileRows;
  const int first = halves ? part : 2 * part;
  const int second = halves ? part + kHalfRows : first + 1;
  float x = 0.0f, y = 0.0f, square = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kStepWarps; ++warp) {
    x += products[warp * a.num_rows * kTileRows + first];
    y += products[warp * a.num_rows * kTileRows + second];
    if constexpr (stage != kO && stage != kDown) square += squares[warp][o.row];
  }
  if constexpr (stage != kO && stage != kDown) {
    const float factor = rsqrtf(square * a.inverse_hidden_size + a.eps);
    x *= factor;
    y *= factor;
  }
  if constexpr (stage == kQkv) {
    constexpr int head_tiles = head_dim / kTileRows;
    const float turned = x * operand.cosine - y * operand.sine;
    y = y * operand.cosine + x * operand.sine;
    x = turned;
    const float other_x = __shfl_xor_sync(kAllLanes, x, 1);
    const float other_y = __shfl_xor_sync(kAllLanes, y, 1);
    if (!real) return;
    const bool even = part % 2 == 0;
    const uint32_t word = even ? pack2<T>(x, other_x) : pack2<T>(other_y, y);
    const int head = tile / head_tiles;
    const int element = tile % head_tiles * kHalfRows + part + (even ? 0 : head_dim / 2 - 1);
    const int width = (a.num_heads + 2 * a.num_kv_heads) * head_dim;
    store4_relaxed(layer_words + a.exchange.qkv + (o.row * width + head * head_dim + element) / 2, word);
    const int64_t offset = s.cache_offset[o.row];
    if (head >= a.num_heads && offset >= 0) {
      const int is_value = head >= a.num_heads + a.num_kv_heads;
      const int half_block = (head - a.num_heads - is_value * a.num_kv_heads) * 2 + is_value;
      T* target = a.kv_cache + layer * a.kv_layer_elements + offset + half_block * a.block_size * head_dim + element;
      *reinterpret_cast<uint32_t*>(target) = word;
    }
  } else if constexpr (stage == kGateUp) {
    x = __fdividef(x, 1.0f + __expf(-x)) * y;
    const float other = __shfl_xor_sync(kAllLanes, x, 1);
    if (!real || part % 2 != 0) return;
    const int element = o.row * a.intermediate_size + tile * kHalfRows + part;
    store4_relaxed(layer_words + a.exchange.activation + element / 2, pack2<T>(x, other));
  } else if constexpr (stage == kLogits) {
    const int feature = tile * kTileRows + 2 * part;
    if (!real) return;
    float* target = a.logits + static_cast<int64_t>(o.row) * a.vocab_size + feature;
    unsigned long long& best = s.best[threadIdx.x];
    if (feature < a.vocab_size) {
      target[0] = x;
      best = max(best, rank_of(x, feature));
    }
    if (feature + 1 < a.vocab_size) {
      target[1] = y;
      best = max(best, rank_of(y, feature + 1));
    }
  } else if (real) {
    const uint32_t residual = operand.residual_at == nullptr
                                  ? operand.residual
                                  : wait_for_word(operand.residual_at, operand.residual, patience);
    const float2 before = unpack2<T>(residual);
    const int word = (o.row * a.hidden_size + tile * kTileRows) / 2 + part;
    store4_relaxed(layer_words + (stage == kO ? a.exchange.middle : a.exchange.hidden) + word,
                   pack2<T>(before.x + x, before.y + y));
  }
}

}  // namespace tinyvllm
