// attention_prefill for sm_90a: formula, shapes and strides of attention_prefill.cu. (After FlashAttention-3, Shah et
// al. 2024, https://arxiv.org/abs/2407.08608.)
// Mapping: a CTA per SM goes from work item to work item: W times 64 rows (token, query head of one KV head), W = 3
//   (D 64) or 2 (D 128). Four warps copy: K and V in tiles of 128 keys, block by block through the block table, and the
//   queries. W warpgroups multiply: each starts the scores of a tile together with the weighted sum of the tile before,
//   the last sum of an item together with the first scores of the next, and they take turns at the tensor cores, so that
//   some multiply while others are at their softmax.
// Traffic: 4 L^2 / 2 * D * Q flop for a prompt of L tokens; bound by the tensor cores. K and V come from L2.
// Limits: bf16, fp16; D 64 or 128; block size 16; any Q / K; scale > 0.
#include "attention_prefill_hopper.cuh"

#include <algorithm>
#include <limits>

namespace tinyvllm {
namespace {

// One warpgroup: its rows of a work item. A lane has parts of two rows, `half` 0 and 1: lane / 4 of its warp's 16, and
// 8 more; the registers of products are laid out as hopper.cuh says.
template <typename T, int head_dim>
struct Multiplier {
  static constexpr int stages = PrefillShape<head_dim>::stages;
  static constexpr int warpgroups = PrefillShape<head_dim>::warpgroups;
  PrefillShared<T, head_dim>& s;
  const int index;              // of the warpgroup
  int tile = 0;                 // the first of the work item in the ring
  int num_items = 0;            // before this one
  float scores[kKeys / 2];      // then weights
  uint32_t weights[kKeys / 4];  // as left operands
  float values[head_dim / 2];   // their weighted sum
  float max[2];                 // of the scores in base 2, or up to kSlack below it
  float sum[2];                 // of the weights, this lane's share

  struct Correction {
    bool needed;
    float factors[2];
  };

  __device__ __forceinline__ Multiplier(PrefillShared<T, head_dim>& shared, int warpgroup)
      : s(shared), index(warpgroup) {
    if (index == warpgroups - 1) pass_turn();
  }

  // All work items of the CTA. The first scores of each are computed while the one before is finished.
  // A warpgroup without rows in an item does the same products, on whatever is there, but neither waits nor stores:
  // products under a condition would make the compiler wait for each.
  __device__ __forceinline__ void attend(const PrefillArguments<T>& a) {
    PrefillItem item = next_item();
    start_scores(0);
    while (item.exists()) {
      const bool active = has_rows(item);
      const int first_row = item.first_row + index * kRows;
      const int row = first_row + threadIdx.x % kWarpgroup / kWarpSize * 16 + threadIdx.x % kWarpSize / 4;
      const int num_tiles = ceil_div(item.num_keys, kKeys);
      const int own_tiles = active ? item.position(first_row + kRows - 1, a.group_heads) / kKeys + 1 : 0;
      const int all_see = item.position(first_row, a.group_heads);  // the last key that every row attends to
      const int position[2] = {item.position(row, a.group_heads), item.position(row + 8, a.group_heads)};
      wgmma_wait<0>();
      settle(scores);
      if (active) release(kK, 0);
      if (own_tiles <= 1) release(&s.queries_empty[num_items % kQueryStages]);
      weigh<true>(kKeys - 1 > all_see, position[0], position[1], a.scale);
      pack_weights();
#pragma unroll
      for (int d = 0; d < head_dim / 2; ++d) values[d] = 0.0f;
#pragma unroll 1
      for (int i = 1; i < own_tiles; ++i) {
        const int first_key = i * kKeys;
        take_turn();
        wait_for(kK, i);
        start_scores(i);
        wait_for(kV, i - 1);
        start_values(stage(i - 1));
        pass_turn();
        wgmma_wait<1>();
        settle(scores);
        release(kK, i);
        if (i + 1 == own_tiles) release(&s.queries_empty[num_items % kQueryStages]);
        const Correction correction = weigh<false>(first_key + kKeys - 1 > all_see, position[0] - first_key,
                                                   position[1] - first_key, a.scale);
        wgmma_wait<0>();
        settle(values);
        settle(weights);
        release(kV, i - 1);
        correct(correction);
        pack_weights();
      }
      for (int i = own_tiles; i < num_tiles; ++i) skip_tile(i);  // at most one, if active: the ring has room for it
      const int last = active ? own_tiles - 1 : 0;
      const int last_stage = stage(last);
      if (active) wait_for(kV, last);
      start_values(last_stage);
      tile += num_tiles;
      ++num_items;
      const PrefillItem next = next_item();
      start_scores(0);
      wgmma_wait<1>();
      settle(values);
      settle(weights);
      if (active) {
        release(&s.empty[kV][last_stage]);
        store(a, item, row);
      }
      item = next;
    }
    wgmma_wait<0>();
    settle(scores);
  }

  __device__ __forceinline__ bool has_rows(const PrefillItem& item) const {
    return item.exists() && item.first_row + index * kRows < item.num_rows;
  }

  // Once its queries are there, and its first keys, if they are needed.
  __device__ __forceinline__ PrefillItem next_item() {
    wait_barrier(shared_address(&s.queries_full[num_items % kQueryStages]), num_items / kQueryStages % 2);
    const PrefillItem item = s.items[num_items % kQueryStages];
    if (has_rows(item)) wait_for(kK, 0);
    return item;
  }

  // Tiles that other warpgroups need.
  __device__ __forceinline__ void skip_tile(int i) {
    if (i > 0) {
      take_turn();
      pass_turn();
    }
    wait_for(kK, i);
    release(kK, i);
    wait_for(kV, i);
    release(kV, i);
  }

  // Of the work item's i-th tiles.
  __device__ __forceinline__ int stage(int i) const { return (tile + i) % stages; }

  __device__ __forceinline__ void wait_for(Matrix matrix, int i) {
    wait_barrier(shared_address(&s.full[matrix][stage(i)]), (tile + i) / stages % 2);
  }

  // This warp no longer reads what the barrier stands for.
  __device__ __forceinline__ void release(uint64_t* empty) {
    if (threadIdx.x % kWarpSize == 0) arrive(shared_address(empty));
  }
  __device__ __forceinline__ void release(Matrix matrix, int i) { release(&s.empty[matrix][stage(i)]); }

  __device__ __forceinline__ void take_turn() {
    named_barrier(kTurnBarrier + index, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() {
    signal_named_barrier(kTurnBarrier + (index + 1) % warpgroups, 2 * kWarpgroup);
  }

  __device__ __forceinline__ void start_scores(int i) {
    const uint64_t queries = panel_descriptor(shared_address(s.queries[num_items % kQueryStages][index]));
    const uint64_t keys = panel_descriptor(shared_address(s.tiles[kK][stage(i)]));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < head_dim / 16; ++k) {
      constexpr int steps = kTileColumns / 16;
      multiply<T>(scores, queries + k / steps * kPanelUnits<kRows> + k % steps * 2,
                  keys + k / steps * kPanelUnits<kKeys> + k % steps * 2, k > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void start_values(int stage) {
    const uint64_t rows = panel_descriptor(shared_address(s.tiles[kV][stage]), kPanelUnits<kKeys> * 16);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) multiply<T>(values, &weights[4 * k], rows + k * kPanelUnits<16>);
    wgmma_commit();
  }

  // Turns scores into weights. If `masked`, the rows attend only to keys up to last0 and last1 of the tile. Raises the
  // maxima if some score of the warp is far above; what was computed with the old ones is then to be corrected.
  template <bool first>
  __device__ __forceinline__ Correction weigh(bool masked, int last0, int last1, float scale) {
    if (masked) {
      const int lane_column = threadIdx.x % 4 * 2;
      const int last[2] = {last0 - lane_column, last1 - lane_column};
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        if (i / 4 * 8 + i % 2 > last[i / 2 % 2]) scores[i] = -INFINITY;
      }
    }
    float top[2] = {scores[0], scores[2]};
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores[i]);
    Correction correction{first, {1.0f, 1.0f}};
    if (!first) {
      const bool far = fmaxf(top[0] * scale - max[0], top[1] * scale - max[1]) > kSlack;
      correction.needed = __any_sync(kAllLanes, far);
    }
    if (correction.needed) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_top = row_max(top[half]) * scale;  // finite in the first tile: every row sees key 0
        const float new_max = first ? row_top : fmaxf(max[half], row_top);
        correction.factors[half] = first ? 0.0f : fast_exp2(max[half] - new_max);
        sum[half] = first ? 0.0f : sum[half] * correction.factors[half];
        max[half] = new_max;
      }
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      scores[i] = fast_exp2(fmaf(scores[i], scale, -max[i / 2 % 2]));
      sum[i / 2 % 2] += scores[i];
    }
    return correction;
  }

  __device__ __forceinline__ void correct(const Correction& correction) {
    if (!correction.needed) return;
#pragma unroll
    for (int d = 0; d < head_dim / 2; ++d) values[d] *= correction.factors[d / 2 % 2];
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) weights[i] = pack2<T>(scores[2 * i], scores[2 * i + 1]);
  }

  __device__ __forceinline__ void store(const PrefillArguments<T>& a, const PrefillItem& item, int first_row) {
    const int num_heads = a.num_kv_heads * a.group_heads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = 1.0f / row_sum(sum[half]);
      const int row = first_row + half * 8;
      const int token = row / a.group_heads;
      const int head = item.kv_head * a.group_heads + row - token * a.group_heads;
      const int64_t offset = (static_cast<int64_t>(item.query_start + token) * num_heads + head) * head_dim;
      T* out = a.out + offset + threadIdx.x % 4 * 2;
#pragma unroll
      for (int d = 0; d < head_dim / 8; ++d) {
        const float* pair = &values[4 * d + 2 * half];
        const uint32_t word = pack2<T>(pair[0] * factor, pair[1] * factor);
        if (row < item.num_rows) *reinterpret_cast<uint32_t*>(out + d * 8) = word;
      }
    }
  }
};

template <typename T, int head_dim>
__device__ __forceinline__ void prefill_on_hopper(const PrefillArguments<T>& a, const CUtensorMap& map) {
  using S = PrefillShape<head_dim>;
  constexpr int registers = head_dim == 64 ? 160 : 224;  // of a thread that multiplies
  constexpr int copy_registers = head_dim == 64 ? 32 : 56;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& s = *reinterpret_cast<PrefillShared<T, head_dim>*>(shared_bytes);
  if (threadIdx.x == 0) {
    constexpr int readers = S::warpgroups * kWarpgroup / kWarpSize;
    for (int i = 0; i < kQueryStages; ++i) {
      init_barrier(shared_address(&s.queries_full[i]), 2);
      init_barrier(shared_address(&s.queries_empty[i]), readers);
    }
    for (const Matrix matrix : {kK, kV}) {
      for (int i = 0; i < S::stages; ++i) {
        init_barrier(shared_address(&s.full[matrix][i]), 1);
        init_barrier(shared_address(&s.empty[matrix][i]), readers);
      }
    }
    init_barrier(shared_address(&s.ragged_full), 1);
    publish_barriers();
  }
  __syncthreads();
  allow_next_kernel();
  wait_for_previous_kernel();

  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpSize, 0);  // the same in all lanes for the compiler too
  const int warpgroup = warp * kWarpSize / kWarpgroup;
  if (warpgroup == S::warpgroups) {
    give_up_registers<copy_registers>();
    const int role = warp % (kWarpgroup / kWarpSize);
    if (role < 2) {
      TileCopier<T, head_dim> copier{a, s, map, static_cast<Matrix>(role)};
      for_each_item<PrefillShape<head_dim>::rows>(a, [&](const PrefillItem& item) { copier.copy_item(item); });
    } else {
      QueryCopier<T, head_dim> copier{a, s, role - 2};
      for_each_item<PrefillShape<head_dim>::rows>(a, [&](const PrefillItem& item) { copier.copy_item(item); });
      copier.copy_item(PrefillItem{});
    }
  } else {
    claim_registers<registers>();
    Multiplier<T, head_dim> multiplier(s, warpgroup);
    multiplier.attend(a);
    if (warpgroup == 0) multiplier.take_turn();  // so that none is left over
  }
}

template <typename T, int head_dim>
__global__ void __launch_bounds__(PrefillShape<head_dim>::threads, 1)
    attention_prefill_hopper_kernel(const __grid_constant__ PrefillArguments<T> a,
                                    const __grid_constant__ CUtensorMap map) {
  if constexpr (kHopperCode) prefill_on_hopper<T, head_dim>(a, map);
}

}  // namespace

template <typename T, int head_dim>
cudaError_t attention_prefill_hopper(const PrefillArguments<T>& a, cudaStream_t stream) {
  using S = PrefillShape<head_dim>;
  const int64_t row_groups = ceil_div<int64_t>(static_cast<int64_t>(a.max_query_len) * a.group_heads, S::rows);
  const int64_t num_items = row_groups * a.num_seqs * a.num_kv_heads;
  constexpr int64_t max_int = std::numeric_limits<int>::max();
  if (a.block_size != kBlockSize || row_groups * S::rows > max_int || num_items > max_int / 2) {
    return cudaErrorInvalidValue;
  }
  CUtensorMap map;
  // How many blocks the cache has is not known here; block ids are trusted, as in the portable kernel.
  const cudaError_t error = describe_array(&map, a.kv_cache, max_int, kBlockSize, head_dim, kBlockSize);
  if (error != cudaSuccess) return error;
  const int64_t num_ctas = std::min<int64_t>(num_items, device_attribute(cudaDevAttrMultiProcessorCount, 1));
  return launch(attention_prefill_hopper_kernel<T, head_dim>, static_cast<unsigned>(num_ctas), S::threads,
                sizeof(PrefillShared<T, head_dim>), stream, a, map);
}

template cudaError_t attention_prefill_hopper<__nv_bfloat16, 64>(const PrefillArguments<__nv_bfloat16>&, cudaStream_t);
template cudaError_t attention_prefill_hopper<__nv_bfloat16, 128>(const PrefillArguments<__nv_bfloat16>&, cudaStream_t);
template cudaError_t attention_prefill_hopper<__half, 64>(const PrefillArguments<__half>&, cudaStream_t);
template cudaError_t attention_prefill_hopper<__half, 128>(const PrefillArguments<__half>&, cudaStream_t);

}  // namespace tinyvllm
