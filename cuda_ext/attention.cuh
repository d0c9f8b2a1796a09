// What both attention kernels need: exp2, and rows of K and V gathered from the paged cache into swizzled tiles.
#pragma once

#include "common.cuh"

namespace tinyvllm {

constexpr float kLog2E = 1.4426950408889634f;

// 2^x by the special-function unit; 0 for -infinity.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Offset, in elements, of 16-byte chunk `chunk` of row `row` in a tile with rows of head_dim elements. The XOR puts one
// chunk of any 8 consecutive rows into 8 different groups of banks: neither ldmatrix nor the copies have conflicts.
template <int head_dim>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * head_dim + ((chunk ^ (row & 7)) * 8);
}

// One KV head of one sequence in a layer's cache [num_blocks, num_kv_heads, 2, block_size, head_dim].
template <typename T, int head_dim>
struct PagedHead {
  const T* cache;         // K of block 0 of this head
  const int32_t* blocks;  // the sequence's row of the block table
  int block_size;
  int64_t block_stride;  // elements from block to block

  __device__ PagedHead(const T* cache, const int32_t* blocks, int num_kv_heads, int kv_head, int block_size)
      : cache(cache + static_cast<int64_t>(kv_head) * 2 * block_size * head_dim),
        blocks(blocks),
        block_size(block_size),
        block_stride(static_cast<int64_t>(num_kv_heads) * 2 * block_size * head_dim) {}

  // K at a position; V of the position lies block_size * head_dim elements further.
  __device__ const T* key(int position) const {
    const int block = position / block_size;
    return cache + (blocks[block] * block_stride + (position - block * block_size) * head_dim);
  }

  // The calling warp starts copies of K and V of num_rows positions into rows first_row and following of two tiles.
  // Lane r passes the key of row r; rows from valid_rows on are filled with zeros and not read.
  template <int num_rows>
  __device__ void copy_rows(T* keys, T* values, int first_row, const T* lane_key, int valid_rows) const {
    constexpr int row_chunks = head_dim / 8;
    static_assert(num_rows <= kWarpSize && num_rows * row_chunks % kWarpSize == 0);
    const int lane = threadIdx.x % kWarpSize;
    const int64_t value_offset = static_cast<int64_t>(block_size) * head_dim;
#pragma unroll
    for (int i = 0; i < num_rows * row_chunks / kWarpSize; ++i) {
      const int row = (i * kWarpSize + lane) / row_chunks;
      const int chunk = (i * kWarpSize + lane) % row_chunks;
      const auto address = __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(lane_key), row);
      const T* source = reinterpret_cast<const T*>(address) + chunk * 8;
      const int target = swizzled<head_dim>(first_row + row, chunk);
      copy16_async(keys + target, source, row < valid_rows);
      copy16_async(values + target, source + value_offset, row < valid_rows);
    }
  }
};

}  // namespace tinyvllm
