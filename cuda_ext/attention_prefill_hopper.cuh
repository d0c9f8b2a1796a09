// The parts of attention_prefill on Hopper that are not arithmetic: shapes, the order of work, the copying of tiles.
#pragma once

#include "attention_hopper.cuh"
#include "attention_prefill.cuh"

namespace tinyvllm {

constexpr int kBlockSize = 16;
constexpr int kKeys = 128;  // of a tile
constexpr int kRows = 64;   // of a warpgroup
constexpr int kQueryStages = 2;

// From one panel of that many rows to the next, in units of panel_descriptor().
template <int rows>
constexpr int kPanelUnits = rows * kTileColumns * 2 / 16;

template <int head_dim>
struct PrefillShape {
  static constexpr int warpgroups = head_dim == 64 ? 3 : 2;  // that multiply
  static constexpr int rows = kRows * warpgroups;
  static constexpr int threads = kWarpgroup * (1 + warpgroups);
  static constexpr int stages = head_dim == 64 ? 4 : 2;
  static constexpr int panels = head_dim / kTileColumns;
};

enum Matrix { kK = 0, kV = 1 };
constexpr int kTurnBarrier = 1;  // of the first warpgroup

// Rows first_row to first_row + rows of one sequence and KV head. Row r is query head r % group_heads of token
// r / group_heads.
struct PrefillItem {
  int kv_head, first_row, table_row, query_start, history, num_rows, num_keys;  // num_rows of the sequence; 0: no item

  __device__ bool exists() const { return first_row < num_rows && table_row >= 0; }

  // Of a row's token; rows past the end repeat the last.
  __device__ int position(int row, int group_heads) const { return history + min(row, num_rows - 1) / group_heads; }
};

template <typename T, int head_dim>
struct PrefillShared {
  using S = PrefillShape<head_dim>;
  T queries[kQueryStages][S::warpgroups][S::panels][kRows * kTileColumns];
  T tiles[2][S::stages][S::panels][kKeys * kTileColumns];
  PrefillItem items[kQueryStages];  // of the queries
  uint64_t queries_full[kQueryStages], queries_empty[kQueryStages];
  uint64_t full[2][S::stages], empty[2][S::stages];
  uint64_t ragged_full;  // a tile of V that goes past the end has been copied, but not cleared there
};

// Calls function(item) for every work item of this CTA. So many sequences are taken at a
// time that a few CTAs share the keys of each, and of these the longest contexts first.
template <int rows, typename T, typename Function>
__device__ __forceinline__ void for_each_item(const PrefillArguments<T>& a, Function&& function) {
  constexpr int shared_heads = 32;  // KV heads, of all sequences, that are read at a time
  const int num_ctas = gridDim.x;
  const int cta = blockIdx.x;
  const int batch = max(shared_heads / a.num_kv_heads, 1);
  int index = cta;
  int round = 0;
  int num_items = 0;
  for (int first_seq = 0; first_seq < a.num_seqs; first_seq += batch) {
    const int end_seq = min(first_seq + batch, a.num_seqs);
    int max_queries = 0;
    for (int seq = first_seq; seq < end_seq; ++seq) {
      max_queries = max(max_queries, a.query_start[seq + 1] - a.query_start[seq]);
    }
    const int row_groups = ceil_div(max_queries * a.group_heads, rows);
    const int num_heads = (end_seq - first_seq) * a.num_kv_heads;
    const int start = num_items;
    num_items += row_groups * num_heads;
    while (index < num_items) {
      const int group = row_groups - 1 - (index - start) / num_heads;
      const int head = (index - start) % num_heads;
      const int seq = first_seq + head / a.num_kv_heads;
      PrefillItem item;
      item.kv_head = head % a.num_kv_heads;
      item.first_row = group * rows;
      item.table_row = a.rows[seq];
      item.query_start = a.query_start[seq];
      const int num_queries = a.query_start[seq + 1] - item.query_start;
      item.history = a.context_lens[seq] - num_queries;
      item.num_rows = num_queries * a.group_heads;
      item.num_keys = item.position(item.first_row + rows - 1, a.group_heads) + 1;
      if (item.exists()) function(item);
      ++round;
      index = round * num_ctas + (round % 2 == 0 ? cta : num_ctas - 1 - cta);  // after a long one a short one
    }
  }
}

// Two warps, which copy the queries of each work item, and the item with them.
template <typename T, int head_dim>
struct QueryCopier {
  const PrefillArguments<T>& a;
  PrefillShared<T, head_dim>& s;
  const int warp;
  int num_items = 0;

  __device__ __forceinline__ void copy_item(const PrefillItem& item) {
    constexpr int row_chunks = head_dim / 8;
    constexpr int step = 2 * kWarpSize / row_chunks;  // rows at a time, by both warps
    const int chunk = threadIdx.x % row_chunks;
    const int group_heads = a.group_heads;
    const int head_step = step % group_heads;
    const int token_step = step / group_heads;
    int row = (warp * kWarpSize + threadIdx.x % kWarpSize) / row_chunks;
    int token = (item.first_row + row) / group_heads;
    int head = item.first_row + row - token * group_heads;
    const T* queries =
        a.q + item.query_start * a.q_stride + item.kv_head * group_heads * head_dim + chunk * 8;
    const int stage = num_items % kQueryStages;
    wait_barrier(shared_address(&s.queries_empty[stage]), num_items / kQueryStages % 2 ^ 1);
    if (warp == 0 && elected()) s.items[stage] = item;
#pragma unroll 4
    for (int i = 0; i < PrefillShape<head_dim>::rows / step; ++i) {
      const bool valid = item.first_row + row < item.num_rows;
      T* panel = s.queries[stage][row / kRows][chunk / 8];
      copy16_async(panel + panel_offset(row % kRows, chunk % 8),
                   valid ? queries + token * a.q_stride + head * head_dim : a.q, valid);
      row += step;
      token += token_step;
      head += head_step;
      if (head >= group_heads) {
        head -= group_heads;
        ++token;
      }
    }
    copy_commit();
    copy_wait<0>();
    publish_to_async();
    __syncwarp();
    if (elected()) arrive(shared_address(&s.queries_full[stage]));
    ++num_items;
  }
};

// One warp, which copies the tiles of K or those of V into their ring. The ring goes on from work item to work item.
template <typename T, int head_dim>
struct TileCopier {
  static constexpr int panels = PrefillShape<head_dim>::panels;
  static constexpr int stages = PrefillShape<head_dim>::stages;
  static constexpr int tile_blocks = kKeys / kBlockSize;
  const PrefillArguments<T>& a;
  PrefillShared<T, head_dim>& s;
  const CUtensorMap& map;
  const Matrix matrix;
  int tile = 0;
  int num_ragged = 0;

  __device__ __forceinline__ void copy_item(const PrefillItem& item) {
    const int num_blocks = ceil_div(item.num_keys, kBlockSize);
    const int32_t* table = a.block_table + static_cast<int64_t>(item.table_row) * a.table_stride;
    for (int first_block = 0; first_block < num_blocks; first_block += tile_blocks, ++tile) {
      const int count = min(tile_blocks, num_blocks - first_block);
      int blocks[tile_blocks];
#pragma unroll
      for (int i = 0; i < tile_blocks; ++i) blocks[i] = i < count ? table[first_block + i] : 0;
      const int valid_keys = item.num_keys - first_block * kBlockSize;
      const bool ragged = matrix == kV && valid_keys < kKeys;
      const int stage = tile % stages;
      T(&target)[panels][kKeys * kTileColumns] = s.tiles[matrix][stage];
      const uint32_t full = shared_address(ragged ? &s.ragged_full : &s.full[matrix][stage]);
      wait_barrier(shared_address(&s.empty[matrix][stage]), tile / stages % 2 ^ 1);
      if (elected()) {
        arrive_expecting(full, count * kBlockSize * head_dim * static_cast<int>(sizeof(T)));
#pragma unroll
        for (int i = 0; i < tile_blocks; ++i) {
          const int index = (blocks[i] * a.num_kv_heads + item.kv_head) * 2 + matrix;
#pragma unroll
          for (int p = 0; p < panels; ++p) {
            T* panel = target[p] + i * kBlockSize * kTileColumns;
            if (i < count) copy_box(shared_address(panel), map, p * kTileColumns, 0, index, full);
          }
        }
      }
      if (ragged) {
        wait_barrier(full, num_ragged++ % 2);
        clear_rows(target, valid_keys);
        if (elected()) arrive(shared_address(&s.full[matrix][stage]));
      }
    }
  }

  // Keys past the end have weight 0, but 0 times what lies there could be NaN.
  __device__ __forceinline__ void clear_rows(T (&target)[panels][kKeys * kTileColumns], int first_row) {
    constexpr int row_chunks = kTileColumns / 8;
    for (int i = first_row * row_chunks + threadIdx.x % kWarpSize; i < kKeys * row_chunks; i += kWarpSize) {
#pragma unroll
      for (int p = 0; p < panels; ++p) store16(target[p] + i * 8, make_uint4(0, 0, 0, 0));
    }
    publish_to_async();
    __syncwarp();
  }
};

}  // namespace tinyvllm
