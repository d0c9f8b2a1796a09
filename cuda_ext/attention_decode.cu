// out[s, h] = softmax(scale * q[s, h] . K[s]) V[s], one query token per sequence, K and V read through the block table.
// out [S, Q * D]; q rows of q_stride elements; kv_cache [B, K, 2, block_size, D]; workspace, counters: see launch.h.
// Mapping: contexts are cut into parts of about equal length, counted on the device; a CTA takes a part of one KV head,
//   with 8 of its query heads; its 4 warps take tiles of 16 tokens in turn; the last CTA of a context merges its parts.
// Traffic: 2 * 2 D bytes per token and KV head, once for each 8 query heads that share it; bound by memory bandwidth.
// Limits: bf16, fp16; D 64 or 128; any block size; any Q / K; K * S * num_splits below 2^31.
#include "attention.cuh"

namespace tinyvllm {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kTile = 16;           // tokens a warp takes at a time: the rows of an mma
constexpr int kStages = 3;          // tiles in each warp's ring
constexpr int kHeads = 8;           // query heads of a CTA: the columns of an mma
constexpr int kMinPartTokens = 128;  // a shorter part would not pay for its merge

template <int head_dim>
constexpr int kRingBytes = kWarps * kStages * 2 * kTile * head_dim * 2;  // more than store_part needs

template <typename T>
struct Arguments {
  T* out;
  const T* q;
  int64_t q_stride;
  const T* kv_cache;
  const int32_t* block_table;
  int table_stride;
  const int32_t* rows;
  const int32_t* context_lens;
  float* workspace;
  int32_t* counters;
  int num_seqs;
  int num_kv_heads;
  int group_heads;  // query heads per KV head
  int block_size;
  int num_splits;
  float scale;  // for scores in base 2
};

// A part of a sequence's context: part `index` of `count`. Parts are numbered through all sequences up to `total`.
struct Part {
  int seq;
  int index;
  int count;
  int total;
};

// Sequence s is cut into ceil(context_lens[s] / part_tokens) parts. With n = num_splits - 1, part_tokens is the mean
// context / n, and half a part's n-th more, so that nearly equal contexts give exactly n parts each; there are never
// more than num_seqs * num_splits. All lanes of a warp call it and get the same result.
__device__ Part find_part(const int32_t* context_lens, int num_seqs, int num_splits, int number) {
  if (num_splits == 1) return {number, 0, 1, num_seqs};
  const int lane = threadIdx.x % kWarpSize;
  unsigned tokens = 0;
  for (int seq = lane; seq < num_seqs; seq += kWarpSize) tokens += context_lens[seq];
  tokens = __reduce_add_sync(kAllLanes, tokens);
  const float n = num_splits - 1;
  const float mean = static_cast<float>(tokens) / (num_seqs * n);
  const int part_tokens = max(kMinPartTokens, static_cast<int>(ceilf(mean * (1.0f + 0.5f / n))));

  Part part{0, 0, 0, 0};
  for (int first = 0; first < num_seqs; first += kWarpSize) {
    const int seq = first + lane;
    const int count = seq < num_seqs ? max(1, ceil_div(context_lens[seq], part_tokens)) : 0;
    int end = part.total + count;  // becomes the number of the first part after this sequence
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int below = __shfl_up_sync(kAllLanes, end - part.total, offset);
      if (lane >= offset) end += below;
    }
    const unsigned owner = __ballot_sync(kAllLanes, end - count <= number && number < end);
    if (owner != 0) {
      const int source = __ffs(static_cast<int>(owner)) - 1;
      part.seq = first + source;
      part.index = number - __shfl_sync(kAllLanes, end - count, source);
      part.count = __shfl_sync(kAllLanes, count, source);
    }
    part.total = __shfl_sync(kAllLanes, end, kWarpSize - 1);
  }
  return part;
}

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
  float max[2] = {-INFINITY, -INFINITY};  // of the scores in base 2
  float sum[2] = {0.0f, 0.0f};            // this lane's share
  float values[head_dim / 16][4] = {};    // [dim, head] as mma results
};

// Adds the warp's tiles first, first + kWarps ... below `end` of a context of `length` tokens.
template <typename T, int head_dim>
__device__ void attend(Softmax<head_dim>& softmax, T* ring, const PagedHead<T, head_dim>& kv, const T* q,
                       int num_heads, int first, int end, int length, float scale) {
  constexpr int stage_elements = 2 * kTile * head_dim;
  const int lane = threadIdx.x % kWarpSize;
  // Lanes r and r + 16 look up row r of a tile. Past the end they look up the last token, which is then not read.
  const auto lookup = [&](int tile) { return kv.key_offset(min(tile * kTile + lane % kTile, length - 1)); };
  const auto copy_tile = [&](int stage, int tile, int64_t lane_offset) {
    T* keys = ring + stage * stage_elements;
    if (tile < end) kv.template copy_rows<kTile>(keys, keys + kTile * head_dim, 0, lane_offset, length - tile * kTile);
    copy_commit();  // also without copies: a wait counts groups
  };
  int64_t offsets[kStages];
#pragma unroll
  for (int i = 0; i < kStages; ++i) offsets[i] = lookup(first + i * kWarps);
#pragma unroll
  for (int i = 0; i < kStages; ++i) copy_tile(i, first + i * kWarps, offsets[i]);
  int64_t next_offset = lookup(first + kStages * kWarps);

  uint32_t query[head_dim / 16][2];
#pragma unroll
  for (int k = 0; k < head_dim / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const T* source = q + (lane / 4) * head_dim + k * 16 + i * 8 + 2 * (lane % 4);
      query[k][i] = lane / 4 < num_heads ? *reinterpret_cast<const uint32_t*>(source) : 0;
    }
  }

  int stage = 0;
  for (int tile = first; tile < end; tile += kWarps) {
    copy_wait<kStages - 1>();
    __syncwarp();
    const T* keys = ring + stage * stage_elements;
    const T* values = keys + kTile * head_dim;
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
    copy_tile(stage, tile + kStages * kWarps, next_offset);
    next_offset = lookup(tile + (kStages + 1) * kWarps);
    stage = stage + 1 == kStages ? 0 : stage + 1;

#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = tile * kTile + lane / 4 + i / 2 * 8;
      scores[i] = position < length ? scores[i] * scale : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float tile_max = reduce_column(fmaxf(scores[i], scores[i + 2]), fmaxf);
      const float new_max = fmaxf(softmax.max[i], tile_max);  // finite: a tile has at least one token
      const float correction = fast_exp2(softmax.max[i] - new_max);
      softmax.max[i] = new_max;
      scores[i] = fast_exp2(scores[i] - new_max);
      scores[i + 2] = fast_exp2(scores[i + 2] - new_max);
      softmax.sum[i] = softmax.sum[i] * correction + (scores[i] + scores[i + 2]);
#pragma unroll
      for (int d = 0; d < head_dim / 16; ++d) {
        softmax.values[d][i] *= correction;
        softmax.values[d][i + 2] *= correction;
      }
    }
    const uint32_t weights[2] = {transpose_matrix(pack2<T>(scores[0], scores[1])),
                                 transpose_matrix(pack2<T>(scores[2], scores[3]))};
#pragma unroll
    for (int d = 0; d < head_dim / 16; ++d) mma_16x8x16<T>(softmax.values[d], value[d], weights);
  }
}

// Joins the warps' results in their order and stores them: in `out` if the part is the whole context, else, not yet
// divided by the sum, in `part_values` [heads, D] and `part_stats` {max, sum} [heads].
template <typename T, int head_dim>
__device__ void store_part(const Softmax<head_dim>& softmax, float* shared, bool whole, T* out, float* part_values,
                           float2* part_stats, int num_heads) {
  constexpr int pitch = head_dim + 4;  // no bank conflicts in the stores below
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  float2* stats = reinterpret_cast<float2*>(shared);  // {max, sum} [kWarps, kHeads]
  float* values = shared + 2 * kWarps * kHeads;       // [kWarps, kHeads, pitch]
  __syncthreads();                                    // the rings are not read any more
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = warp * kHeads + lane % 4 * 2 + i;
    const float sum = reduce_column(softmax.sum[i], [](float x, float y) { return x + y; });
    if (lane / 4 == 0) stats[row] = make_float2(softmax.max[i], sum);
#pragma unroll
    for (int d = 0; d < head_dim / 16; ++d) {
      values[row * pitch + d * 16 + lane / 4] = softmax.values[d][i];
      values[row * pitch + d * 16 + lane / 4 + 8] = softmax.values[d][i + 2];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_heads * (head_dim / 4); i += kThreads) {
    const int head = i / (head_dim / 4);
    const int dim = i % (head_dim / 4) * 4;
    float max = stats[head].x;
    for (int w = 1; w < kWarps; ++w) max = fmaxf(max, stats[w * kHeads + head].x);
    float sum = 0.0f;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int w = 0; w < kWarps; ++w) {
      const float2 stat = stats[w * kHeads + head];
      const float4 value = *reinterpret_cast<const float4*>(values + (w * kHeads + head) * pitch + dim);
      const float weight = fast_exp2(stat.x - max);
      sum += weight * stat.y;
      total.x += weight * value.x;
      total.y += weight * value.y;
      total.z += weight * value.z;
      total.w += weight * value.w;
    }
    if (whole) {
      const float factor = 1.0f / sum;
      *reinterpret_cast<uint2*>(out + head * head_dim + dim) =
          make_uint2(pack2<T>(total.x * factor, total.y * factor), pack2<T>(total.z * factor, total.w * factor));
    } else {
      *reinterpret_cast<float4*>(part_values + head * head_dim + dim) = total;
      if (dim == 0) part_stats[head] = make_float2(max, sum);
    }
  }
}

// Counts this CTA's arrival; true in all threads of the last of `arrivals` CTAs, which then sees what the others wrote.
__device__ bool is_last_to_arrive(int32_t* counter, int arrivals) {
  bool last = false;
  __syncthreads();  // all stores of this CTA come before the fence
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(counter, 1) == arrivals - 1;
    if (last) *counter = 0;  // as the next launch expects it
    __threadfence();
  }
  return __syncthreads_or(last);
}

// Merges the parts of one context in their order, a warp per query head. Part i is at values + i * values_stride.
template <typename T, int head_dim>
__device__ void merge_parts(T* out, const float* values, int64_t values_stride, const float2* stats,
                            int64_t stats_stride, int num_parts, int num_heads) {
  const int lane = threadIdx.x % kWarpSize;
  for (int head = threadIdx.x / kWarpSize; head < num_heads; head += kWarps) {
    float max = -INFINITY;
    for (int i = lane; i < num_parts; i += kWarpSize) max = fmaxf(max, __ldcg(stats + i * stats_stride + head).x);
    max = warp_max(max);
    float sum = 0.0f;
    float2 total[head_dim / 64] = {};
#pragma unroll 16
    for (int i = 0; i < num_parts; ++i) {
      const float2 stat = __ldcg(stats + i * stats_stride + head);
      const float weight = fast_exp2(stat.x - max);
      sum += weight * stat.y;
#pragma unroll
      for (int d = 0; d < head_dim / 64; ++d) {
        const float* source = values + i * values_stride + head * head_dim + d * 64 + 2 * lane;
        const float2 value = __ldcg(reinterpret_cast<const float2*>(source));
        total[d].x += weight * value.x;
        total[d].y += weight * value.y;
      }
    }
#pragma unroll
    for (int d = 0; d < head_dim / 64; ++d) {
      *reinterpret_cast<uint32_t*>(out + head * head_dim + d * 64 + 2 * lane) =
          pack2<T>(total[d].x / sum, total[d].y / sum);
    }
  }
}

template <typename T, int head_dim>
__global__ void __launch_bounds__(kThreads) attention_decode_kernel(const Arguments<T> a) {
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / kWarpSize;
  const int kv_head = blockIdx.x % a.num_kv_heads;
  const int group_head = blockIdx.y * kHeads;  // the first of this CTA's query heads within the group
  const int num_heads = min(kHeads, a.group_heads - group_head);
  const int group_dims = a.group_heads * head_dim;
  T* ring = reinterpret_cast<T*>(shared) + warp * kStages * 2 * kTile * head_dim;
  const int64_t num_slots = static_cast<int64_t>(a.num_seqs) * a.num_kv_heads * a.num_splits;
  float* slot_values = a.workspace;                                                     // [num_slots, group_dims]
  float2* slot_stats = reinterpret_cast<float2*>(slot_values + num_slots * group_dims);  // [num_slots, group_heads]
  allow_next_kernel();
  wait_for_previous_kernel();

  const int step = gridDim.x / a.num_kv_heads;
  int number = blockIdx.x / a.num_kv_heads;
  for (int total = number + 1; number < total; number += step) {  // two parts at most, nearly always one
    const Part part = find_part(a.context_lens, a.num_seqs, a.num_splits, number);
    total = part.total;
    if (number >= total) return;
    const int row = a.rows[part.seq];
    const int length = row < 0 ? 0 : a.context_lens[part.seq];
    T* group_out = a.out + (static_cast<int64_t>(part.seq) * a.num_kv_heads + kv_head) * group_dims;
    T* out = group_out + group_head * head_dim;
    if (length == 0) {
      const uint4 zeros = make_uint4(0, 0, 0, 0);
      for (int i = threadIdx.x; i < num_heads * head_dim / 8; i += kThreads) store16(out + i * 8, zeros);
      continue;
    }

    const int num_tiles = ceil_div(length, kTile);
    const int share = num_tiles / part.count;
    const int remainder = num_tiles % part.count;
    const int first = part.index * share + min(part.index, remainder);
    const int end = first + share + (part.index < remainder ? 1 : 0);
    const int32_t* blocks = a.block_table + static_cast<int64_t>(row) * a.table_stride;
    const PagedHead<T, head_dim> kv(a.kv_cache, blocks, a.num_kv_heads, kv_head, a.block_size);
    const T* q = a.q + part.seq * a.q_stride + kv_head * group_dims + group_head * head_dim;
    Softmax<head_dim> softmax;
    attend<T, head_dim>(softmax, ring, kv, q, num_heads, first + warp, end, length, a.scale);

    const int64_t slot = static_cast<int64_t>(number) * a.num_kv_heads + kv_head;
    store_part<T, head_dim>(softmax, reinterpret_cast<float*>(shared), part.count == 1, out,
                            slot_values + slot * group_dims + group_head * head_dim,
                            slot_stats + slot * a.group_heads + group_head, num_heads);
    if (part.count > 1 &&
        is_last_to_arrive(a.counters + part.seq * a.num_kv_heads + kv_head, part.count * gridDim.y)) {
      const int64_t first_slot = slot - static_cast<int64_t>(part.index) * a.num_kv_heads;
      merge_parts<T, head_dim>(group_out, slot_values + first_slot * group_dims, a.num_kv_heads * group_dims,
                               slot_stats + first_slot * a.group_heads, a.num_kv_heads * a.group_heads, part.count,
                               a.group_heads);
    }
    __syncthreads();  // before another part reuses the shared memory
  }
}

}  // namespace

cudaError_t attention_decode(void* out, const void* q, int64_t q_stride, const void* kv_cache,
                             const int32_t* block_table, int table_stride, const int32_t* rows,
                             const int32_t* context_lens, float* workspace, int32_t* counters, int num_seqs,
                             int num_heads, int num_kv_heads, int head_dim, int block_size, int num_splits,
                             float scale, Dtype dtype, cudaStream_t stream) {
  const bool supported = num_seqs >= 0 && num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0 &&
                         block_size > 0 && num_splits > 0 && table_stride >= 0 && q_stride % 8 == 0 &&
                         static_cast<int64_t>(num_seqs) * num_kv_heads * num_splits <= INT32_MAX &&
                         is_aligned16(out) && is_aligned16(q) && is_aligned16(kv_cache) && is_aligned16(workspace);
  if (!supported) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto type) {
    return dispatch_head_dim(head_dim, [&](auto dim) {
      using T = typename decltype(type)::type;
      if (num_seqs == 0) return cudaSuccess;
      const Arguments<T> arguments{
          static_cast<T*>(out), static_cast<const T*>(q), q_stride, static_cast<const T*>(kv_cache), block_table,
          table_stride, rows, context_lens, workspace, counters, num_seqs, num_kv_heads, num_heads / num_kv_heads,
          block_size, num_splits, scale * kLog2E};
      // One CTA per part that equal contexts have; what uneven ones have beyond is taken by the same CTAs.
      const int parts = num_seqs * (num_splits > 1 ? num_splits - 1 : 1);
      const dim3 grid(num_kv_heads * parts, ceil_div(arguments.group_heads, kHeads));
      return launch(attention_decode_kernel<T, dim()>, grid, kThreads, kRingBytes<dim()>, stream, arguments);
    });
  });
}

}  // namespace tinyvllm
