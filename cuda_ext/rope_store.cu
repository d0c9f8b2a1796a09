// q, k: (a, b) -> (a cos - b sin, b cos + a sin), a = h[i], b = h[i + D/2]; q in place, k and (unrotated) v to cache.
// qkv [T, (Q + 2K) D]; kv_cache [B, K, 2, block_size, D]; rope_table float [*, D]: D/2 cosines, then D/2 sines.
// Grid: one CTA per token; a thread takes 8 elements of a head's first half and the 8 that go with them in the second.
// Traffic: 4 T (Q + 2K) D bytes (each element read and written); bound by latency at decode, by bandwidth at prefill.
// Limits: bf16 or fp16; head_dim 64 or 128; a token with slot -1 is left as it is.
#include "rope.cuh"

namespace tinyvllm {
namespace {

constexpr int kMaxThreads = 256;

template <typename T>
__device__ __forceinline__ void rotate4(uint32_t& first, uint32_t& next, uint32_t& second, uint32_t& next_second,
                                        float4 cosines, float4 sines) {
  rotate2<T>(first, second, make_float2(cosines.x, cosines.y), make_float2(sines.x, sines.y));
  rotate2<T>(next, next_second, make_float2(cosines.z, cosines.w), make_float2(sines.z, sines.w));
}

template <typename T, int kHeadDim>
__global__ __launch_bounds__(kMaxThreads) void rope_store_kernel(T* qkv, T* kv_cache, const float* rope_table,
                                                                 const int32_t* positions, const int32_t* slots,
                                                                 int num_heads, int num_kv_heads, int block_size) {
  constexpr int kHalf = kHeadDim / 2;
  constexpr int kPieces = kHalf / 8;
  allow_next_kernel();
  wait_for_previous_kernel();
  const int token = blockIdx.x;
  const int slot = slots[token];
  const float* angles = rope_table + static_cast<int64_t>(positions[token]) * kHeadDim;
  if (slot < 0) return;
  const int all_heads = num_heads + 2 * num_kv_heads;
  const int block = slot / block_size;
  const int offset = slot % block_size;

  for (int item = threadIdx.x; item < all_heads * kPieces; item += blockDim.x) {
    const int head = item / kPieces;
    const int element = item % kPieces * 8;
    T* source = qkv + (static_cast<int64_t>(token) * all_heads + head) * kHeadDim + element;
    T* target = source;
    if (head >= num_heads) {
      const int is_value = head >= num_heads + num_kv_heads;
      const int kv_head = head - num_heads - is_value * num_kv_heads;
      const int64_t half_block = (static_cast<int64_t>(block) * num_kv_heads + kv_head) * 2 + is_value;
      target = kv_cache + (half_block * block_size + offset) * kHeadDim + element;
    }
    uint4 first = load16(source);
    uint4 second = load16(source + kHalf);
    if (head < num_heads + num_kv_heads) {
      const float4* cosines = reinterpret_cast<const float4*>(angles + element);
      const float4* sines = reinterpret_cast<const float4*>(angles + kHalf + element);
      rotate4<T>(first.x, first.y, second.x, second.y, cosines[0], sines[0]);
      rotate4<T>(first.z, first.w, second.z, second.w, cosines[1], sines[1]);
    }
    store16(target, first);
    store16(target + kHalf, second);
  }
}

}  // namespace

cudaError_t rope_store(void* qkv, void* kv_cache, const float* rope_table, const int32_t* positions,
                       const int32_t* slots, int num_tokens, int num_heads, int num_kv_heads, int head_dim,
                       int block_size, Dtype dtype, cudaStream_t stream) {
  const bool supported = num_tokens >= 0 && num_heads > 0 && num_kv_heads > 0 && block_size > 0 && is_aligned16(qkv) &&
                         is_aligned16(kv_cache) && is_aligned16(rope_table);
  if (!supported) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_head_dim(head_dim, [&](auto dim) {
      if (num_tokens == 0) return cudaSuccess;
      const int items = (num_heads + 2 * num_kv_heads) * (dim() / 16);
      const int threads = items < kMaxThreads ? ceil_div(items, kWarpSize) * kWarpSize : kMaxThreads;
      return launch(rope_store_kernel<T, dim()>, num_tokens, threads, 0, stream, static_cast<T*>(qkv),
                    static_cast<T*>(kv_cache), rope_table, positions, slots, num_heads, num_kv_heads, block_size);
    });
  });
}

}  // namespace tinyvllm
