// What stands between the linear layers of decode_step: the products become queries, keys and values, activations, the
// residual stream, or logits.
#pragma once

#include "decode_step_linear.cuh"

namespace tinyvllm {

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
// is behind a norm; `best` is the rank of the largest logit that the thread has seen.
template <typename T, int head_dim, int stage>
__device__ __forceinline__ void finish_output(const StepArguments<T>& a, const StepShared& s, const Output& o,
                                              const Operand& operand, int layer, uint32_t* layer_words,
                                              int first_tile, int num_tiles, const float* partial,
                                              const float (&squares)[kStepWarps][kMaxStepRows],
                                              uint64_t& best, const Patience& patience) {
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
    x = silu(x) * y;
    const float other = __shfl_xor_sync(kAllLanes, x, 1);
    if (!real || part % 2 != 0) return;
    const int element = o.row * a.intermediate_size + tile * kHalfRows + part;
    store4_relaxed(layer_words + a.exchange.activation + element / 2, pack2<T>(x, other));
  } else if constexpr (stage == kLogits) {
    const int feature = tile * kTileRows + 2 * part;
    if (!real) return;
    float* target = a.logits + static_cast<int64_t>(o.row) * a.vocab_size + feature;
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
