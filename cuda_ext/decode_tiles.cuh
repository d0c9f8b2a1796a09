// How a warp of attention_decode attends to tiles of 16 tokens: copies through its own ring, tensor cores, online softmax.
#pragma once

#include "attention.cuh"
#include "decode_shape.cuh"
#include "rope.cuh"

namespace tinyvllm {

constexpr float kSlack = 8.0f;  // how far, in powers of 2, scores may exceed the maximum in use (FlashAttention-4)

// Over the 8 lanes that hold one column of an mma result.
template <typename Operation>
__device__ __forceinline__ float reduce_column(float value, Operation operation) {
#pragma unroll
  for (int offset = 4; offset < kWarpSize; offset *= 2) {
    value = operation(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

// Transposes an 8x8 matrix of 16-bit elements, held as by load_matrices.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t word) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

// Online softmax over a warp's tiles, for 8 query heads. A lane holds heads 2 * (lane % 4) and the next one.
template <int head_dim>
struct Softmax {
  float max[2] = {-INFINITY, -INFINITY};  // of the scores in base 2, or less by up to kSlack
  float sum[2] = {0.0f, 0.0f};            // this lane's share
  float values[head_dim / 16][4] = {};    // [dim, head] as mma results
};

// The tiles first, first + step ... below `end` of a context of `length` tokens, of which the cache holds all but one.
struct Tiles {
  int first;
  int step;
  int end;
  int length;
};

// The newest token as the layer's linear gives it: the query heads of this CTA, and the KV head that they share.
template <typename T>
struct NewToken {
  const T* q;      // [num_heads, D], not rotated
  const T* key;    // [D], not rotated
  const T* value;  // [D]
  int num_heads;
  const float* angles;  // of its position: D / 2 cosines, D / 2 sines
  T* cache;             // of the KV head, as PagedHead has it, to store K and V in; null: another CTA does
};

__device__ __forceinline__ float2 load_pair(const float* address) { return *reinterpret_cast<const float2*>(address); }

// K, rotated, and V of the newest token in a warp's registers: each lane has 2 elements of the first half of K or V, and
// the 2 that lie D / 2 further, head_dim / 64 times.
template <typename T, int head_dim>
class NewestRow {
 public:
  __device__ __forceinline__ void load(const NewToken<T>& token) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const T* source = (is_value(i) ? token.value : token.key) + element(i);
      first_[i] = load4(source);
      second_[i] = load4(source + head_dim / 2);
      const float* angles = token.angles + element(i);
      if (!is_value(i)) rotate2<T>(first_[i], second_[i], load_pair(angles), load_pair(angles + head_dim / 2));
    }
  }

  // Into rows of the cache.
  __device__ __forceinline__ void store(T* key, T* value) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      T* target = (is_value(i) ? value : key) + element(i);
      store4(target, first_[i]);
      store4(target + head_dim / 2, second_[i]);
    }
  }

  // Into a row of a tile.
  __device__ __forceinline__ void store(T* keys, T* values, int row) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      T* target = (is_value(i) ? values : keys) + element(i) % 8;
      store4(target + swizzled<head_dim>(row, element(i) / 8), first_[i]);
      store4(target + swizzled<head_dim>(row, element(i) / 8 + head_dim / 16), second_[i]);
    }
  }

 private:
  static constexpr int count = head_dim / 64;
  static constexpr int words = head_dim / 4;  // of half a head

  static __device__ __forceinline__ int item(int i) { return i * kWarpSize + threadIdx.x % kWarpSize; }
  static __device__ __forceinline__ bool is_value(int i) { return item(i) >= words; }
  static __device__ __forceinline__ int element(int i) { return item(i) % words * 2; }

  uint32_t first_[count];
  uint32_t second_[count];
};

// Adds the warp's tiles. The calls up to the first query are made before the previous kernel has ended.
template <typename T, int head_dim>
__device__ void attend(Softmax<head_dim>& softmax, T* ring, const PagedHead<T, head_dim>& kv, unsigned reciprocal,
                       const NewToken<T>& token, const Tiles& tiles, float scale) {
  constexpr int stage_elements = 2 * kTile * head_dim;
  constexpr int row_chunks = head_dim / 8;
  const int lane = threadIdx.x % kWarpSize;
  const bool in_blocks = kv.block_size % kTile == 0;  // a tile is contiguous in memory
  const int newest = tiles.length - 1;
  const auto column_of = [&](int position) {  // position / block_size, if their product is below 2^30
    return static_cast<int>(__umulhi(2 * position + 1, reciprocal));
  };
  const auto offset_of = [&](int32_t block, int position) {
    return block * kv.block_stride + (position - column_of(position) * kv.block_size) * head_dim;
  };
  // Lane i gets the block of the warp's tile index + i; past the end that of the newest token, which is not read.
  const auto look_up = [&](int index) {
    const int position = min((tiles.first + (index + lane) * tiles.step) * kTile, newest);
    return __ldcg(kv.blocks + column_of(position));
  };
  int32_t blocks = look_up(0);
  int32_t next_blocks = 0;
  const auto copy_tile = [&](int stage, int index) {
    T* keys = ring + stage * stage_elements;
    T* values = keys + kTile * head_dim;
    const int tile = tiles.first + index * tiles.step;
    const int valid_rows = tile < tiles.end ? newest - tile * kTile : 0;
    if (in_blocks) {
      constexpr int rows = kWarpSize / row_chunks;  // that the warp copies at a time
      const int32_t block = __shfl_sync(kAllLanes, blocks, index % kWarpSize);
      const T* source = kv.cache + offset_of(block, tile * kTile) + lane * 8;
      const T* value_source = source + kv.block_size * head_dim;
#pragma unroll
      for (int i = 0; i < kTile / rows; ++i) {
        const int row = i * rows + lane / row_chunks;
        const int target = swizzled<head_dim>(row, lane % row_chunks);
        copy16_async(keys + target, source + i * kWarpSize * 8, row < valid_rows);
        copy16_async(values + target, value_source + i * kWarpSize * 8, row < valid_rows);
      }
    } else {
      const int position = min(tile * kTile + lane % kTile, newest);
      const T* key = kv.cache + offset_of(__ldcg(kv.blocks + column_of(position)), position);
      kv.template copy_rows<kTile>(keys, values, 0, key, valid_rows);
    }
    copy_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) copy_tile(i, i);

  const int newest_tile = newest / kTile;
  const bool has_newest = tiles.first <= newest_tile && newest_tile < tiles.end &&
                          (newest_tile - tiles.first) % tiles.step == 0;
  const int32_t newest_block = has_newest ? __ldcg(kv.blocks + column_of(newest)) : 0;
  float2 cosines[head_dim / 32][2];
  float2 sines[head_dim / 32][2];
#pragma unroll
  for (int k = 0; k < head_dim / 32; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* angles = token.angles + k * 16 + i * 8 + 2 * (lane % 4);
      cosines[k][i] = load_pair(angles);
      sines[k][i] = load_pair(angles + head_dim / 2);
    }
  }
  wait_for_previous_kernel();

  uint32_t query[head_dim / 16][2];
#pragma unroll
  for (int k = 0; k < head_dim / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const T* source = token.q + (lane / 4) * head_dim + k * 16 + i * 8 + 2 * (lane % 4);
      query[k][i] = lane / 4 < token.num_heads ? load4(source) : 0;
    }
  }
  NewestRow<T, head_dim> row;
  if (has_newest) {
    row.load(token);
    if (token.cache != nullptr) {
      T* key = token.cache + offset_of(newest_block, newest);
      row.store(key, key + kv.block_size * head_dim);
    }
  }
#pragma unroll
  for (int k = 0; k < head_dim / 32; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rotate2<T>(query[k][i], query[k + head_dim / 32][i], cosines[k][i], sines[k][i]);
    }
  }

  int stage = 0;
  int ahead = kStages;  // index of the tile to be copied next
  for (int tile = tiles.first; tile < tiles.end; tile += tiles.step) {
    copy_wait<kStages - 1>();
    __syncwarp();
    T* keys = ring + stage * stage_elements;
    T* values = keys + kTile * head_dim;
    if (tile == newest_tile) {
      row.store(keys, values, newest % kTile);
      __syncwarp();
    }
    float scores[4] = {};  // [token, head]: K as the left operand, the queries as the right one
#pragma unroll
    for (int k = 0; k < head_dim / 16; ++k) {
      uint32_t key[4];
      load_matrices(key, keys + swizzled<head_dim>(lane % 16, 2 * k + lane / 16));
      mma_16x8x16<T>(scores, key, query[k]);
    }
    uint32_t value[head_dim / 16][4];  // V transposed: [dim, token]
#pragma unroll
    for (int d = 0; d < head_dim / 16; ++d) {
      load_matrices_transposed(value[d],
                               values + swizzled<head_dim>(lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2));
    }
    __syncwarp();  // all lanes have read the stage
    if (ahead % kWarpSize == kWarpSize / 2) next_blocks = look_up(ahead + kWarpSize / 2);
    if (ahead % kWarpSize == 0) blocks = next_blocks;
    copy_tile(stage, ahead++);
    stage = stage + 1 == kStages ? 0 : stage + 1;

#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = tile * kTile + lane / 4 + i / 2 * 8;
      scores[i] = token < tiles.length ? scores[i] * scale : -INFINITY;
    }
    bool grows = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) grows |= fmaxf(scores[i], scores[i + 2]) > softmax.max[i] + kSlack;
    if (__any_sync(kAllLanes, grows)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float tile_max = reduce_column(fmaxf(scores[i], scores[i + 2]), fmaxf);
        const float new_max = fmaxf(softmax.max[i], tile_max);  // finite: a tile has at least one token
        const float correction = fast_exp2(softmax.max[i] - new_max);
        softmax.max[i] = new_max;
        softmax.sum[i] *= correction;
#pragma unroll
        for (int d = 0; d < head_dim / 16; ++d) {
          softmax.values[d][i] *= correction;
          softmax.values[d][i + 2] *= correction;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] = fast_exp2(scores[i] - softmax.max[i % 2]);
      softmax.sum[i % 2] += scores[i];
    }
    const uint32_t weights[2] = {transpose_matrix(pack2<T>(scores[0], scores[1])),
                                 transpose_matrix(pack2<T>(scores[2], scores[3]))};
#pragma unroll
    for (int d = 0; d < head_dim / 16; ++d) mma_16x8x16<T>(softmax.values[d], value[d], weights);
  }
  copy_wait<0>();  // zeros for tiles past the end may still be on their way
}

}  // namespace tinyvllm
