// What the portable and the Hopper form of attention_prefill share: arguments, and the choice between them.
#pragma once

#include "attention.cuh"

namespace tinyvllm {

template <typename T>
struct PrefillArguments {
  T* out;
  const T* q;
  int64_t q_stride;
  const T* kv_cache;
  const int32_t* block_table;
  int table_stride;
  const int32_t* rows;
  const int32_t* query_start;
  const int32_t* context_lens;
  int num_seqs;
  int max_query_len;
  int num_kv_heads;
  int group_heads;  // query heads per KV head
  int block_size;
  float scale;  // for scores in base 2
};

// The maximum that a row's weights are relative to is raised only when a score exceeds it by more than this, in base 2:
// weights up to 256 are as exact as those up to 1, and a row is rarely rescaled.
constexpr float kSlack = 8.0f;

// Over the 4 lanes that hold one row of a matrix product.
__device__ __forceinline__ float row_max(float value) { return warp_max<4>(value); }
__device__ __forceinline__ float row_sum(float value) { return warp_sum<4>(value); }

// For sm_90a: cudaErrorInvalidValue for shapes that it leaves to the portable kernel. Arguments are checked before.
template <typename T, int head_dim>
cudaError_t attention_prefill_hopper(const PrefillArguments<T>& arguments, cudaStream_t stream);

}  // namespace tinyvllm
