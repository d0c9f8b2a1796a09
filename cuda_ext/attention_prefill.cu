// out[t, h] = softmax(scale * q[t, h] . K[0..p]) V[0..p] for the query at position p: causal chunks with history.
// q rows of q_stride elements, out [T, Q * D]; kv_cache [B, K, 2, block_size, D]; sequences as in launch.h.
// Mapping: a CTA takes 128 rows (token, query head of one KV head), late tokens first; each of its 8 warps keeps 16 of
//   them in registers; all warps share tiles of keys, double-buffered in shared memory (FlashAttention-2), and take them
//   in steps of 32. That leaves room for 16 warps on an SM (D 64): some multiply while others are at their softmax.
// Traffic: 4 L^2 / 2 * D * Q flop for a prompt of L tokens; bound by the tensor cores. K and V come from L2.
// Limits: bf16, fp16; D 64 or 128; any block size; any Q / K; scale > 0. On sm_90 attention_prefill_hopper.cu takes the
//   shapes that it can.
#include "attention_prefill.cuh"

namespace tinyvllm {
namespace {

constexpr int kRows = 128;   // (token, head) pairs of a CTA
constexpr int kRowTiles = 1;  // groups of 16 rows of a warp
constexpr int kStep = 32;     // keys that a warp takes at a time
constexpr int kWarps = kRows / (16 * kRowTiles);
constexpr int kThreads = kWarps * kWarpSize;

template <int head_dim>
constexpr int kKeys = 8192 / head_dim;  // of a tile

template <int head_dim>
constexpr int kMinCtas = head_dim == 64 ? 2 : 1;  // on an SM

template <int head_dim>
constexpr int kSharedBytes = (kRows + 2 * 2 * kKeys<head_dim>) * head_dim * 2;  // queries; two stages of K and V

// The rows of one warp: a lane holds rows lane / 4 and lane / 4 + 8 of each row tile.
template <typename T, int head_dim>
struct WarpRows {
  uint32_t query[kRowTiles][head_dim / 16][4];
  float values[kRowTiles][head_dim / 8][4] = {};
  float max[kRowTiles][2];  // of the unscaled scores, or up to kSlack below it
  float sum[kRowTiles][2];  // this lane's share

  // Adds kStep keys. If `masked`, row r of the warp attends only to the first num_seen(r) of them.
  template <typename Function>
  __device__ __forceinline__ void attend(const T* keys, const T* value_rows, bool masked, Function&& num_seen,
                                         float scale) {
    const int lane = threadIdx.x % kWarpSize;
    float scores[kRowTiles][kStep / 8][4] = {};
#pragma unroll
    for (int k = 0; k < head_dim / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kStep / 16; ++n) {
        uint32_t key[4];  // two column groups of 8 keys
        load_matrices(key, keys + n * 16 * head_dim +
                               swizzled<head_dim>(lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma_16x8x16<T>(scores[r][2 * n], query[r][k], {key[0], key[1]});
          mma_16x8x16<T>(scores[r][2 * n + 1], query[r][k], {key[2], key[3]});
        }
      }
    }
    if (masked) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int seen = num_seen(r * 16 + i / 2 * 8 + lane / 4);
#pragma unroll
          for (int n = 0; n < kStep / 8; ++n) {
            if (n * 8 + lane % 4 * 2 + i % 2 >= seen) scores[r][n][i] = -INFINITY;
          }
        }
      }
    }
    raise_max(scores, scale);

    uint32_t weights[kRowTiles][kStep / 16][4];  // scores as left operands of the second product
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n) {
        float weight[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weight[i] = fast_exp2(fmaf(scores[r][n][i], scale, -max[r][i / 2] * scale));
          sum[r][i / 2] += weight[i];
        }
        weights[r][n / 2][n % 2 * 2] = pack2<T>(weight[0], weight[1]);
        weights[r][n / 2][n % 2 * 2 + 1] = pack2<T>(weight[2], weight[3]);
      }
    }

#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
      for (int d = 0; d < head_dim / 16; ++d) {
        uint32_t value[4];  // two column groups of 8 dims
        load_matrices_transposed(value, value_rows + k * 16 * head_dim +
                                            swizzled<head_dim>(lane % 16, 2 * d + lane / 16));
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma_16x8x16<T>(values[r][2 * d], weights[r][k], {value[0], value[1]});
          mma_16x8x16<T>(values[r][2 * d + 1], weights[r][k], {value[2], value[3]});
        }
      }
    }
  }

  // Raises the maxima, and rescales what they were used for, if some score of the warp is far above.
  __device__ __forceinline__ void raise_max(const float (&scores)[kRowTiles][kStep / 8][4], float scale) {
    float top[kRowTiles][2];  // in this lane
    bool far = false;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[r][i] = fmaxf(scores[r][0][2 * i], scores[r][0][2 * i + 1]);
#pragma unroll
        for (int n = 1; n < kStep / 8; ++n) {
          top[r][i] = fmaxf(top[r][i], fmaxf(scores[r][n][2 * i], scores[r][n][2 * i + 1]));
        }
        far = far || (top[r][i] - max[r][i]) * scale > kSlack;
      }
    }
    if (!__any_sync(kAllLanes, far)) return;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float new_max = fmaxf(max[r][i], row_max(top[r][i]));  // finite: every row sees key 0 in the first step
        const float correction = fast_exp2((max[r][i] - new_max) * scale);
        max[r][i] = new_max;
        sum[r][i] *= correction;
#pragma unroll
        for (int d = 0; d < head_dim / 8; ++d) {
          values[r][d][2 * i] *= correction;
          values[r][d][2 * i + 1] *= correction;
        }
      }
    }
  }
};

template <typename T, int head_dim>
__global__ void __launch_bounds__(kThreads, kMinCtas<head_dim>) attention_prefill_kernel(const PrefillArguments<T> a) {
  constexpr int tile_keys = kKeys<head_dim>;
  constexpr int copied_rows = tile_keys / kWarps;  // of each tile by each warp
  constexpr int row_chunks = head_dim / 8;
  extern __shared__ uint4 shared[];
  T* queries = reinterpret_cast<T*>(shared);  // [kRows, head_dim], swizzled
  T* tiles = queries + kRows * head_dim;      // [2 stages, K then V, tile_keys, head_dim], swizzled
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int kv_head = blockIdx.x;
  const int seq = blockIdx.y;
  const int first_row = (gridDim.z - 1 - blockIdx.z) * kRows;  // the longest contexts first
  const int warp_row = warp * 16 * kRowTiles;
  allow_next_kernel();
  wait_for_previous_kernel();

  const int query_start = a.query_start[seq];
  const int num_queries = a.query_start[seq + 1] - query_start;
  const int num_rows = num_queries * a.group_heads;
  const int table_row = a.rows[seq];
  if (first_row >= num_rows || table_row < 0) return;
  const int history = a.context_lens[seq] - num_queries;
  // Row r is query head r % group_heads of token r / group_heads; rows past the end repeat the last one's position.
  const auto position = [&](int row) { return history + min(row, num_rows - 1) / a.group_heads; };
  const auto row_offset = [&](int row, int64_t stride) {
    const int token = row / a.group_heads;
    return (query_start + token) * stride + (kv_head * a.group_heads + row - token * a.group_heads) * head_dim;
  };

#pragma unroll
  for (int i = 0; i < 16 * kRowTiles * row_chunks / kWarpSize; ++i) {
    const int row = warp_row + (i * kWarpSize + lane) / row_chunks;
    const int chunk = (i * kWarpSize + lane) % row_chunks;
    const bool valid = first_row + row < num_rows;
    const T* source = a.q + (valid ? row_offset(first_row + row, a.q_stride) : 0) + chunk * 8;
    copy16_async(queries + swizzled<head_dim>(row, chunk), source, valid);
  }
  copy_commit();

  const int num_keys = position(first_row + kRows - 1) + 1;
  const int copied_row = warp * copied_rows;
  const auto tile_at = [&](int first_key) { return tiles + first_key % (2 * tile_keys) * 2 * head_dim; };
  const auto copy_tile = [&](int first_key) {
    const int key = first_key + copied_row;
    if (first_key < num_keys) {
      const int32_t* blocks = a.block_table + static_cast<int64_t>(table_row) * a.table_stride;
      const PagedHead<T, head_dim> kv(a.kv_cache, blocks, a.num_kv_heads, kv_head, a.block_size);
      // Past the end the last key is looked up, which is then not read.
      const T* lane_key = kv.key(min(key + lane % copied_rows, num_keys - 1));
      T* keys = tile_at(first_key);
      kv.template copy_rows<copied_rows>(keys, keys + tile_keys * head_dim, copied_row, lane_key, num_keys - key);
    }
    copy_commit();
  };
  copy_tile(0);

  copy_wait<1>();
  __syncwarp();  // a warp reads only the queries that it has copied
  WarpRows<T, head_dim> state;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int k = 0; k < head_dim / 16; ++k) {
      load_matrices(state.query[r][k], queries + swizzled<head_dim>(warp_row + r * 16 + lane % 16, 2 * k + lane / 16));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      state.max[r][i] = -INFINITY;
      state.sum[r][i] = 0.0f;
    }
  }

  const int all_see = position(first_row + warp_row);  // the last key that every row of the warp attends to
  const bool idle = first_row + warp_row >= num_rows;
  const int last_key = idle ? -1 : position(first_row + warp_row + 16 * kRowTiles - 1);
  for (int first_key = 0; first_key < num_keys; first_key += tile_keys) {
    copy_wait<0>();
    __syncthreads();  // this tile is there for all warps, and all have read the one before
    copy_tile(first_key + tile_keys);
    const T* keys = tile_at(first_key);
    const int end = min(first_key + tile_keys, last_key + 1);
#pragma unroll 1
    for (int key = first_key; key < end; key += kStep, keys += kStep * head_dim) {
      const auto num_seen = [&](int row) { return position(first_row + warp_row + row) - key + 1; };
      state.attend(keys, keys + tile_keys * head_dim, key + kStep - 1 > all_see, num_seen, a.scale);
    }
  }

  const int64_t out_stride = static_cast<int64_t>(a.num_kv_heads) * a.group_heads * head_dim;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float factor = 1.0f / row_sum(state.sum[r][i]);
      const int row = first_row + warp_row + r * 16 + i * 8 + lane / 4;
      T* out = a.out + row_offset(row, out_stride) + lane % 4 * 2;
#pragma unroll
      for (int d = 0; d < head_dim / 8; ++d) {
        const uint32_t pair = pack2<T>(state.values[r][d][2 * i] * factor, state.values[r][d][2 * i + 1] * factor);
        if (row < num_rows) *reinterpret_cast<uint32_t*>(out + d * 8) = pair;
      }
    }
  }
}

}  // namespace

cudaError_t attention_prefill(void* out, const void* q, int64_t q_stride, const void* kv_cache,
                              const int32_t* block_table, int table_stride, const int32_t* rows,
                              const int32_t* query_start, const int32_t* context_lens, int num_seqs,
                              int max_query_len, int num_heads, int num_kv_heads, int head_dim, int block_size,
                              float scale, Dtype dtype, cudaStream_t stream) {
  constexpr int max_grid = 65535;  // in y and z
  if (num_kv_heads <= 0 || num_heads <= 0 || num_heads % num_kv_heads != 0) return cudaErrorInvalidValue;
  const int group_heads = num_heads / num_kv_heads;
  const int64_t row_groups = ceil_div<int64_t>(static_cast<int64_t>(max_query_len) * group_heads, kRows);
  const bool supported = num_seqs >= 0 && num_seqs <= max_grid && max_query_len >= 0 && row_groups <= max_grid &&
                         block_size > 0 && table_stride >= 0 && q_stride % 8 == 0 && scale > 0.0f &&
                         is_aligned16(out) && is_aligned16(q) && is_aligned16(kv_cache);
  if (!supported) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto type) {
    return dispatch_head_dim(head_dim, [&](auto dim) {
      using T = typename decltype(type)::type;
      if (num_seqs == 0 || max_query_len == 0) return cudaSuccess;
      const PrefillArguments<T> arguments{static_cast<T*>(out), static_cast<const T*>(q), q_stride,
                                          static_cast<const T*>(kv_cache), block_table, table_stride, rows, query_start,
                                          context_lens, num_seqs, max_query_len, num_kv_heads, group_heads, block_size,
                                          scale * kLog2E};
      if (device_attribute(cudaDevAttrComputeCapabilityMajor, 0) == 9) {
        const cudaError_t error = attention_prefill_hopper<T, dim()>(arguments, stream);
        if (error != cudaErrorInvalidValue) return error;
      }
      const dim3 grid(num_kv_heads, num_seqs, static_cast<unsigned>(row_groups));
      return launch(attention_prefill_kernel<T, dim()>, grid, kThreads, kSharedBytes<dim()>, stream,
                    arguments);
    });
  });
}

}  // namespace tinyvllm
