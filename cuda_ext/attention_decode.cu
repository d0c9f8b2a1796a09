// out[s, h] = softmax(scale * q[s, h] . K[s]) V[s], one query token per sequence, K and V read through the block table;
//   q and k of qkv are rotated first (see rope.cuh), and K and V of the token stored in the cache.
// out [S, Q * D]; qkv [S, (Q + 2 K) D]; kv_cache [B, K, 2, block_size, D]; workspace: see launch.h.
// Mapping: a CTA takes one KV head of a part of one context, with 8 of its query heads; it has as many warps as let all
//   (sequence, KV head) pairs be resident at once, and they take tiles of 16 tokens in turn, each through its own ring.
//   The warp with the newest token puts it into its tile; the cache's place for it is written, and read by nobody.
// Traffic: 2 * 2 D bytes per token and KV head, once for each 8 query heads that share it; bound by memory bandwidth.
// Limits: bf16, fp16; D 64 or 128; any Q / K; any block size, its product with a position below 2^30;
//   2 * S * K * ceil(Q / K / 8) * num_splits and S * Q * num_splits below 2^31.
//
// Before it waits for the previous kernel it reads parts, the block table, and K and V of all tokens but the newest, all
// past L1: see launch.h for what that asks of its predecessors.
#include "decode_parts.cuh"
#include "decode_rows.cuh"

namespace tinyvllm {
namespace {

template <typename T>
struct Arguments {
  T* out;
  const T* qkv;
  T* kv_cache;
  const float* rope_table;
  const int32_t* block_table;
  int table_stride;
  const Part* parts;
  int32_t* queue;
  float* slots;  // of all parts
  int num_kv_heads;
  int group_heads;  // query heads per KV head
  int block_size;
  unsigned reciprocal;  // of block_size, times 2^31, rounded up
  float scale;  // for scores in base 2
};

template <typename T, int head_dim>
__global__ void __launch_bounds__(kSmWarps<head_dim> * kWarpSize)  // so few registers that all of them fit
    attention_decode_kernel(const Arguments<T> a) {
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;
  T* ring = reinterpret_cast<T*>(shared) + warp * kStages * 2 * kTile * head_dim;
  int* shared_item = reinterpret_cast<int*>(shared) + num_warps * kRingBytes<head_dim> / 4;
  const int groups = ceil_div(a.group_heads, kHeads);
  const int group_dims = a.group_heads * head_dim;
  allow_next_kernel();

  int number = blockIdx.z;  // of a part
  int kv_head = blockIdx.x;
  int group = blockIdx.y;  // of 8 query heads within those of the KV head
  while (true) {
    const int group_head = group * kHeads;
    const int num_heads = min(kHeads, a.group_heads - group_head);
    const Part part = load_part(a.parts, number);
    if (part.count == 0) break;
    const bool alone = part.total <= gridDim.z;  // every part has its own CTAs
    const int length = part.length;
    T* group_out = a.out + (static_cast<int64_t>(part.seq) * a.num_kv_heads + kv_head) * group_dims;
    T* out = group_out + group_head * head_dim;
    if (length == 0) {
      wait_for_previous_kernel();
      const uint4 zeros = make_uint4(0, 0, 0, 0);
      for (int i = threadIdx.x; i < num_heads * head_dim / 8; i += blockDim.x) store16(out + i * 8, zeros);
    } else {
      const int32_t* blocks = a.block_table + static_cast<int64_t>(part.row) * a.table_stride;
      const PagedHead<T, head_dim> kv(a.kv_cache, blocks, a.num_kv_heads, kv_head, a.block_size);
      const T* qkv = a.qkv + static_cast<int64_t>(part.seq) * (a.group_heads + 2) * a.num_kv_heads * head_dim;
      const T* keys = qkv + a.num_kv_heads * group_dims;
      NewToken<T> token;
      token.q = qkv + kv_head * group_dims + group_head * head_dim;
      token.key = keys + kv_head * head_dim;
      token.value = keys + (a.num_kv_heads + kv_head) * head_dim;
      token.num_heads = num_heads;
      token.angles = a.rope_table + static_cast<int64_t>(length - 1) * head_dim;
      token.cache = group == 0 ? a.kv_cache + (kv.cache - a.kv_cache) : nullptr;
      Softmax<head_dim> softmax;
      const Tiles tiles{part.first + warp, num_warps, part.end, length};
      attend<T, head_dim>(softmax, ring, kv, a.reciprocal, token, tiles, a.scale);

      // The slots of a context's parts follow each other, for each KV head and group.
      const int heads_before = (number - part.index) * a.num_kv_heads * a.group_heads +
                               (kv_head * a.group_heads + group_head) * part.count;
      float* slots = a.slots + static_cast<int64_t>(heads_before) * kSlotWords<head_dim>;
      finish_part<T, head_dim>(softmax, shared, part, out, slots, num_heads, alone);
    }
    if (alone) break;
    const int heads = a.num_kv_heads * groups;
    const int item = take_item(a.queue, (part.total - gridDim.z) * heads, shared_item);
    number = gridDim.z + item / heads;
    if (number >= part.total) break;
    group = item / a.num_kv_heads % groups;
    kv_head = item % a.num_kv_heads;
  }
  wait_for_previous_kernel();  // also without work
}

}  // namespace

cudaError_t attention_decode(void* out, const void* qkv, void* kv_cache, const float* rope_table,
                             const int32_t* block_table, int table_stride, const int32_t* parts, float* workspace,
                             int num_seqs, int num_heads, int num_kv_heads, int head_dim,
                             int block_size, int num_splits, int min_warps, float scale, Dtype dtype,
                             cudaStream_t stream) {
  const bool divisible = num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0;
  if (!divisible || num_seqs < 0 || num_splits <= 0 || min_warps <= 0) return cudaErrorInvalidValue;
  const int64_t pairs = static_cast<int64_t>(num_seqs) * num_kv_heads * ceil_div(num_heads / num_kv_heads, kHeads);
  const int64_t block_elements = static_cast<int64_t>(num_kv_heads) * 2 * block_size * head_dim;
  const bool supported = block_size > 0 && block_elements <= INT32_MAX && table_stride >= 0 &&
                         pairs <= INT32_MAX / 2 / num_splits && is_aligned16(out) && is_aligned16(qkv) &&
                         is_aligned16(kv_cache) && is_aligned16(rope_table) && is_aligned16(parts) &&
                         is_aligned16(workspace);
  if (!supported) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto type) {
    return dispatch_head_dim(head_dim, [&](auto dim) {
      using T = typename decltype(type)::type;
      if (num_seqs == 0) return cudaSuccess;
      const DecodeShape shape = choose_decode_shape<dim()>(num_seqs, num_heads, num_kv_heads, num_splits, min_warps);
      const Arguments<T> arguments{
          static_cast<T*>(out), static_cast<const T*>(qkv), static_cast<T*>(kv_cache), rope_table, block_table,
          table_stride, reinterpret_cast<const Part*>(parts), reinterpret_cast<int32_t*>(workspace), workspace + 4,
          num_kv_heads, num_heads / num_kv_heads, block_size, ceil_div(1u << 31, static_cast<unsigned>(block_size)),
          scale * kLog2E};
      const dim3 grid(num_kv_heads, shape.groups, shape.first_parts);
      return launch(attention_decode_kernel<T, dim()>, grid, shape.num_warps * kWarpSize,
                    shape.shared_bytes, stream, arguments);
    });
  });
}

}  // namespace tinyvllm
