// The attention of decode_step: one query token per sequence, a CTA per part of a KV head's context, its warps in turn a
// tile of 16 tokens, with K and V in registers. Scores = q K^T and out = P V have the query heads (up to 8) as rows of
// the left operand. K and V come from the cache but for the newest token's, which come out of the exchange. If a context
// has more than one part, its parts go through the exchange as well, to be merged by a warp somewhere.
#pragma once

#include "decode_step.cuh"

namespace tinyvllm {

constexpr int kTileTokens = 16;
constexpr int kHeadRows = 8;  // query heads of one item

// Per warp and head: D sums, the largest score, the sum of weights; padded to 16 bytes.
template <int head_dim>
constexpr int kHeadFloats = head_dim + 4;

template <int head_dim>
constexpr int attention_floats(int group_heads) {
  return kStepWarps * (group_heads < kHeadRows ? group_heads : kHeadRows) * kHeadFloats<head_dim>;
}

struct AttentionItem {
  int layer, seq, kv_head, group_head, num_heads, split;
};

// With g = lane / 4 and q = lane % 4: keys: tokens g and g + 8, 16-byte pieces 4 i + q; values: tokens 2q, 2q + 1,
// 2q + 8 and 2q + 9, pieces g + 8 i.
template <int head_dim>
struct KvTile {
  uint4 keys[2][head_dim / 32];
  uint4 values[4][head_dim / 64];

  __device__ __forceinline__ bool has_holes() const {
    bool holes = false;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < head_dim / 32; ++i) holes |= has_hole(keys[j][i]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < head_dim / 64; ++i) holes |= has_hole(values[j][i]);
    }
    return holes;
  }
};

template <typename T, int head_dim>
struct KvSource {
  PagedHead<T, head_dim> cached;
  const T* new_key;
  const T* new_value;
  int length;

  // The newest token's words may be holes.
  __device__ __forceinline__ KvTile<head_dim> load(int index) const {
    const int g = threadIdx.x % kWarpSize / 4;
    const int q = threadIdx.x % 4;
    KvTile<head_dim> tile;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const T* row = key(index * kTileTokens + 8 * j + g);
#pragma unroll
      for (int i = 0; i < head_dim / 32; ++i) tile.keys[j][i] = load16_relaxed(row + (4 * i + q) * 8);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const T* row = value(index * kTileTokens + 2 * q + j % 2 + j / 2 * 8);
#pragma unroll
      for (int i = 0; i < head_dim / 64; ++i) tile.values[j][i] = load16_relaxed(row + (g + 8 * i) * 8);
    }
    return tile;
  }

 private:
  // Past the end stands the newest token, which is then not counted.
  __device__ const T* key(int position) const {
    return position >= length - 1 ? new_key : cached.key(position);
  }

  __device__ const T* value(int position) const {
    return position >= length - 1 ? new_value
                                  : cached.key(position) + static_cast<int64_t>(cached.block_size) * head_dim;
  }
};

__device__ __forceinline__ uint32_t word_of(uint4 v, int index) {
  return index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w;
}

// The warp's online softmax of head g: in all lanes of g.
template <int head_dim>
struct HeadSums {
  float largest = -INFINITY;
  float weight = 0.0f;                    // this lane's share
  float out[head_dim / 64][8][2] = {};    // [i][e]: elements 64 i + 16 q + e, and 8 more, of head g
};

template <typename T, int head_dim>
__device__ __forceinline__ void attend_tile(HeadSums<head_dim>& sums, const KvTile<head_dim>& tile,
                                            const uint4 (&query)[head_dim / 32], int first_token, int length,
                                            float scale) {
  const int q = threadIdx.x % 4;
  float scores[2][4] = {};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < head_dim / 32; ++i) {
      const uint4 k = tile.keys[j][i];
      mma_16x8x16<T>(scores[j], {query[i].x, 0, query[i].y, 0}, {k.x, k.y});
      mma_16x8x16<T>(scores[j], {query[i].z, 0, query[i].w, 0}, {k.z, k.w});
    }
  }
  float largest = sums.largest;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = first_token + 8 * j + 2 * q + i;
      scores[j][i] = token < length ? scores[j][i] * scale : -INFINITY;
      largest = fmaxf(largest, scores[j][i]);
    }
  }
  largest = warp_max<4>(largest);  // finite: a tile has at least one token
  const float correction = fast_exp2(sums.largest - largest);
  sums.largest = largest;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) scores[j][i] = fast_exp2(scores[j][i] - largest);
  }
  sums.weight = sums.weight * correction + (scores[0][0] + scores[0][1] + (scores[1][0] + scores[1][1]));
  const uint32_t weights[4] = {pack2<T>(scores[0][0], scores[0][1]), 0, pack2<T>(scores[1][0], scores[1][1]), 0};
#pragma unroll
  for (int i = 0; i < head_dim / 64; ++i) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      uint32_t right[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        right[j] = __byte_perm(word_of(tile.values[2 * j][i], e / 2), word_of(tile.values[2 * j + 1][i], e / 2),
                               e % 2 == 0 ? 0x5410 : 0x7632);
      }
      float out[4] = {sums.out[i][e][0] * correction, sums.out[i][e][1] * correction, 0.0f, 0.0f};
      mma_16x8x16<T>(out, weights, right);
      sums.out[i][e][0] = out[0];
      sums.out[i][e][1] = out[1];
    }
  }
}

// Joins what the warps know of an item. out: num_heads rows, `pitch` words apart; if those are records of a part, the
// logarithm of the sum of weights follows each.
template <typename T, int head_dim>
__device__ __forceinline__ void join_warps(const AttentionItem& item, const float* scratch, int num_warps,
                                           uint32_t* out, int pitch) {
  for (int i = threadIdx.x; i < item.num_heads * (head_dim / 2); i += kStepThreads) {
    const int head = i / (head_dim / 2);
    const int pair = i % (head_dim / 2);
    const float* mine = scratch + head * kHeadFloats<head_dim>;
    const int stride = item.num_heads * kHeadFloats<head_dim>;
    float largest = -INFINITY;
    for (int w = 0; w < num_warps; ++w) largest = fmaxf(largest, mine[w * stride + head_dim]);
    float weight = 0.0f, x = 0.0f, y = 0.0f;
    for (int w = 0; w < num_warps; ++w) {
      const float factor = fast_exp2(mine[w * stride + head_dim] - largest);
      weight += factor * mine[w * stride + head_dim + 1];
      x += factor * mine[w * stride + 2 * pair];
      y += factor * mine[w * stride + 2 * pair + 1];
    }
    const float scale = num_warps > 0 ? 1.0f / weight : 0.0f;
    store4_relaxed(out + head * pitch + pair, pack2<T>(x * scale, y * scale));
    if (pair == 0 && pitch == kRecordWords<head_dim>) {
      store4_relaxed(out + head * pitch + head_dim / 2, __float_as_uint(largest + log2f(weight)));
    }
  }
}

// One item, by all multiplying warps; `scratch` is free when it begins.
template <typename T, int head_dim>
__device__ __forceinline__ void attend(const StepArguments<T>& a, const StepShared& s, uint32_t* layer_words, float* scratch,
                       const AttentionItem& item, const Patience& patience) {
  const int g = threadIdx.x % kWarpSize / 4;
  const int q = threadIdx.x % 4;
  const int warp = threadIdx.x / kWarpSize;
  const int width = (a.num_heads + 2 * a.num_kv_heads) * head_dim;
  const T* qkv = reinterpret_cast<const T*>(layer_words + a.exchange.qkv) + item.seq * width;
  const int first_head = item.kv_head * (a.num_heads / a.num_kv_heads) + item.group_head;
  const int length = s.length[item.seq];
  const int first_tile = item.split * s.tiles_per_split[item.seq];
  const int end_tile = min(first_tile + s.tiles_per_split[item.seq], ceil_div(length, kTileTokens));
  const int32_t* blocks = a.block_table + static_cast<int64_t>(s.row[item.seq]) * a.table_stride;
  const T* new_key = qkv + (a.num_heads + item.kv_head) * head_dim;
  const KvSource<T, head_dim> source{{a.kv_cache + item.layer * a.kv_layer_elements, blocks, a.num_kv_heads,
                                      item.kv_head, a.block_size},
                                     new_key, new_key + a.num_kv_heads * head_dim, length};
  int index = first_tile + warp;
  if (index < end_tile) {
    KvTile<head_dim> tile = source.load(index);
    const T* query_row = qkv + (first_head + g) * head_dim;
    uint4 query[head_dim / 32];
#pragma unroll
    for (int i = 0; i < head_dim / 32; ++i) {
      const uint32_t word = g < item.num_heads ? kHole : 0;
      query[i] = make_uint4(word, word, word, word);
    }
#pragma unroll 1
    for (bool holes = true; holes;) {
#pragma unroll
      for (int i = 0; i < head_dim / 32; ++i) {
        if (has_hole(query[i])) query[i] = load16_relaxed(query_row + (4 * i + q) * 8);
      }
      holes = false;
#pragma unroll
      for (int i = 0; i < head_dim / 32; ++i) holes |= has_hole(query[i]);
      holes = __any_sync(kAllLanes, holes) && !patience.is_over();
    }
    HeadSums<head_dim> sums;
#pragma unroll 1
    for (; index < end_tile; index += kStepWarps) {
      if ((index + 1) * kTileTokens >= length) {  // with the newest token
#pragma unroll 1
        while (__any_sync(kAllLanes, tile.has_holes()) && !patience.is_over()) tile = source.load(index);
      }
      if constexpr (head_dim == 64) {
        const KvTile<head_dim> current = tile;
        if (index + kStepWarps < end_tile) tile = source.load(index + kStepWarps);
        attend_tile<T, head_dim>(sums, current, query, index * kTileTokens, length, a.scale * kLog2E);
      } else {  // there are no registers for two tiles
        attend_tile<T, head_dim>(sums, tile, query, index * kTileTokens, length, a.scale * kLog2E);
        if (index + kStepWarps < end_tile) tile = source.load(index + kStepWarps);
      }
    }
    const float weight = warp_sum<4>(sums.weight);
    if (g < item.num_heads) {
      float* mine = scratch + (warp * item.num_heads + g) * kHeadFloats<head_dim>;
#pragma unroll
      for (int i = 0; i < head_dim / 64; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          mine[64 * i + 16 * q + e] = sums.out[i][e][0];
          mine[64 * i + 16 * q + 8 + e] = sums.out[i][e][1];
        }
      }
      if (q == 0) {
        mine[head_dim] = sums.largest;
        mine[head_dim + 1] = weight;
      }
    }
  }
  named_barrier(1, kStepThreads);
  const int num_warps = max(min(kStepWarps, end_tile - first_tile), 0);
  const int out_row = item.seq * a.num_heads + first_head;
  if (s.num_splits[item.seq] == 1) {
    join_warps<T, head_dim>(item, scratch, num_warps, layer_words + a.exchange.attention + out_row * (head_dim / 2),
                            head_dim / 2);
  } else {
    const int64_t record = static_cast<int64_t>(item.split) * a.num_rows * a.num_heads + out_row;
    join_warps<T, head_dim>(item, scratch, num_warps,
                            layer_words + a.exchange.parts + record * kRecordWords<head_dim>, kRecordWords<head_dim>);
  }
}

}  // namespace tinyvllm
