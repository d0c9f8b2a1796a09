// The attention of decode_step: one query token per sequence, a CTA per part of a KV head's context, its warps in turn a
// tile of 16 tokens, with K and V in registers. Scores = q K^T and out = P V have the query heads (up to 8) as rows of
// the left operand. K and V come from the cache but for the newest token's, which come out of the exchange. If a context
// has more than one part, its parts go through the exchange as well, and a warp somewhere merges them.
#pragma once

#include "decode_step.cuh"

namespace tinyvllm {

constexpr int kTileTokens = 16;
constexpr int kHeadRows = 8;  // query heads of one item

// Per warp and head: D sums, the largest score, the sum of weights; padded to 16 bytes.
template <int head_dim>
constexpr int kHeadFloats = head_dim + 4;

template <int head_dim>
__host__ __device__ constexpr int attention_floats(int group_heads) {
  return kStepWarps * (group_heads < kHeadRows ? group_heads : kHeadRows) * kHeadFloats<head_dim>;
}

constexpr float kLowest = -1e30f;  // below all scores, and finite

struct AttentionItem {
  int layer, seq, kv_head, group_head, num_heads, split;
};

// With g = lane / 4 and q = lane % 4: keys: tokens g and g + 8, 16-byte pieces 4 i + q; values: tokens 2q, 2q + 1,
// 2q + 8 and 2q + 9, pieces g + 8 i.
template <int head_dim>
struct KvTile {
  uint4 keys[2][head_dim / 32];
  uint4 values[4][head_dim / 64];

  template <typename Action>
  __device__ __forceinline__ void for_each(Action&& action) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < head_dim / 32; ++i) action(keys[j][i]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < head_dim / 64; ++i) action(values[j][i]);
    }
  }

  __device__ __forceinline__ bool has_holes() {
    bool holes = false;
    for_each([&](const uint4& v) { holes |= has_hole(v); });
    return holes;
  }
};

// Of a KV head of a sequence, in a layer's cache [num_blocks, num_kv_heads, 2, block_size, head_dim].
template <typename T, int head_dim>
struct KvSource {
  const T* cache;         // of block 0
  const int32_t* blocks;  // the sequence's row of the block table
  const T* newest;        // the newest token's key
  int newest_value;       // elements behind it
  int64_t block_stride;   // elements from block to block
  Divisor by_block_size;
  int length;

  __device__ __forceinline__ bool has_newest(int tile) const { return (tile + 1) * kTileTokens >= length; }

  // The newest token's pieces may have holes afterwards.
  __device__ __forceinline__ void fill(KvTile<head_dim>& tile, int index) const {
    const int g = threadIdx.x % kWarpSize / 4;
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const T* row = key(index * kTileTokens + 8 * j + g, 0);
#pragma unroll
      for (int i = 0; i < head_dim / 32; ++i) tile.keys[j][i] = load16_relaxed(row + (4 * i + q) * 8);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const T* row = key(index * kTileTokens + 2 * q + j % 2 + j / 2 * 8, 1);
#pragma unroll
      for (int i = 0; i < head_dim / 64; ++i) tile.values[j][i] = load16_relaxed(row + (g + 8 * i) * 8);
    }
  }

 private:
  // K or V of a position. Past the end stands the newest token, which is then not counted.
  __device__ __forceinline__ const T* key(int position, int is_value) const {
    if (position >= length - 1) return newest + is_value * newest_value;
    const int block = by_block_size.quotient(position);
    const int in_block = position - block * by_block_size.divisor + is_value * by_block_size.divisor;
    return cache + (blocks[block] * block_stride + in_block * head_dim);
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
__device__ __forceinline__ void join_warps(const AttentionItem& item, const float* scratch, uint32_t* out, int pitch) {
#pragma unroll 1
  for (int i = threadIdx.x; i < item.num_heads * (head_dim / 2); i += kStepThreads) {
    const int head = i / (head_dim / 2);
    const int pair = i % (head_dim / 2);
    const float* mine = scratch + head * kHeadFloats<head_dim>;
    const int stride = item.num_heads * kHeadFloats<head_dim>;
    float largest = kLowest;
#pragma unroll
    for (int w = 0; w < kStepWarps; ++w) largest = fmaxf(largest, mine[w * stride + head_dim]);
    float weight = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
    for (int w = 0; w < kStepWarps; ++w) {
      const float factor = fast_exp2(mine[w * stride + head_dim] - largest);
      weight += factor * mine[w * stride + head_dim + 1];
      x += factor * mine[w * stride + 2 * pair];
      y += factor * mine[w * stride + 2 * pair + 1];
    }
    const float scale = weight > 0.0f ? 1.0f / weight : 0.0f;
    store4_relaxed(out + head * pitch + pair, pack2<T>(x * scale, y * scale));
    if (pair == 0 && pitch == kRecordWords<head_dim>) {
      store4_relaxed(out + head * pitch + head_dim / 2, __float_as_uint(largest + log2f(weight)));
    }
  }
}

// One item, by all multiplying warps; `scratch` is free when it begins.
template <typename T, int head_dim>
__device__ __forceinline__ void attend(const StepArguments<T>& a, const StepShared& s, uint32_t* layer_words,
                                       float* scratch, const AttentionItem& item, const Patience& patience) {
  const int thread = thread_index();
  const int g = thread % kWarpSize / 4;
  const int q = thread % 4;
  const int warp = thread / kWarpSize;
  const int width = (a.num_heads + 2 * a.num_kv_heads) * head_dim;
  const T* qkv = reinterpret_cast<const T*>(layer_words + a.exchange.qkv) + item.seq * width;
  const int first_head = item.kv_head * a.group_heads + item.group_head;
  const int length = s.length[item.seq];
  const int first_tile = item.split * s.tiles_per_split[item.seq];
  const int end_tile = min(first_tile + s.tiles_per_split[item.seq], ceil_div(length, kTileTokens));
  const int32_t* blocks = a.block_table + static_cast<int64_t>(s.row[item.seq]) * a.table_stride;
  const int64_t half_block = static_cast<int64_t>(a.block_size) * head_dim;
  const KvSource<T, head_dim> source{a.kv_cache + item.layer * a.kv_layer_elements + item.kv_head * 2 * half_block,
                                     blocks,
                                     qkv + (a.num_heads + item.kv_head) * head_dim,
                                     a.num_kv_heads * head_dim,
                                     a.num_kv_heads * 2 * half_block,
                                     a.by_block_size,
                                     length};
  HeadSums<head_dim> sums;
  const int first = first_tile + warp;
  if (first < end_tile) {
    const T* query_row = qkv + (first_head + g) * head_dim;
    uint4 query[head_dim / 32] = {};
    KvTile<head_dim> tile = {};
#pragma unroll 1
    for (bool holes = true, begins = true; holes; begins = false) {
#pragma unroll
      for (int i = 0; i < head_dim / 32; ++i) {
        query[i] = g < item.num_heads ? load16_relaxed(query_row + (4 * i + q) * 8) : make_uint4(0, 0, 0, 0);
      }
      if (begins || source.has_newest(first)) source.fill(tile, first);
      holes = source.has_newest(first) && tile.has_holes();
#pragma unroll
      for (int i = 0; i < head_dim / 32; ++i) holes |= has_hole(query[i]);
      holes = __any_sync(kAllLanes, holes) && !patience.is_over();
    }
#pragma unroll 1
    for (int index = first;;) {
      attend_tile<T, head_dim>(sums, tile, query, index * kTileTokens, length, a.scale * kLog2E);
      index += kStepWarps;
      if (index >= end_tile) break;
#pragma unroll 1
      do {
        source.fill(tile, index);
      } while (source.has_newest(index) && __any_sync(kAllLanes, tile.has_holes()) && !patience.is_over());
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
  named_barrier(1, kStepThreads);
  const int out_row = item.seq * a.num_heads + first_head;
  if (s.num_splits[item.seq] == 1) {
    join_warps<T, head_dim>(item, scratch, layer_words + a.exchange.attention + out_row * (head_dim / 2), head_dim / 2);
  } else {
    const int64_t record = static_cast<int64_t>(item.split) * a.num_rows * a.num_heads + out_row;
    join_warps<T, head_dim>(item, scratch, layer_words + a.exchange.parts + record * kRecordWords<head_dim>,
                            kRecordWords<head_dim>);
  }
}

}  // namespace tinyvllm
