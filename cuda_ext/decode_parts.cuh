// How attention_decode cuts the contexts of a batch into parts of about equal length, counted on the device, how its CTAs
// take them (the first gridDim.x by number, what uneven contexts have beyond from a queue), and how parts are merged.
#pragma once

#include "attention.cuh"

namespace tinyvllm {

// A part of a sequence's context: part `index` of `count`. Parts are numbered through all sequences up to `total`.
struct Part {
  int seq;
  int index;
  int count;
  int total;
};

struct PartRule {
  int num_splits;    // 1: never cut
  int whole_tokens;  // contexts up to this are never cut: merging would cost more
  int min_tokens;    // of a part
};

// A sequence's context is cut into ceil(length / part_tokens) parts. With n = num_splits - 1, part_tokens is the mean
// context / n, and half a part's n-th more, so that nearly equal contexts give exactly n parts each; there are never
// more than num_seqs * num_splits. All lanes of a warp call it and get the same result. It reads past L1, so that it may
// run before wait_for_previous_kernel().
__device__ inline Part find_part(const int32_t* context_lens, int num_seqs, const PartRule& rule, int number) {
  if (rule.num_splits == 1) return {number, 0, 1, num_seqs};
  const int lane = threadIdx.x % kWarpSize;
  unsigned tokens = 0;
  unsigned contexts = 0;
  int longest = 0;
#pragma unroll 4
  for (int seq = lane; seq < num_seqs; seq += kWarpSize) {
    const int length = __ldcg(context_lens + seq);
    tokens += length;
    contexts += length > 0 ? 1 : 0;
    longest = max(longest, length);
  }
  tokens = __reduce_add_sync(kAllLanes, tokens);
  contexts = __reduce_add_sync(kAllLanes, contexts);
  longest = __reduce_max_sync(kAllLanes, longest);
  const float n = rule.num_splits - 1;
  const float mean = static_cast<float>(tokens) / (max(contexts, 1u) * n);
  const int part_tokens = max(rule.min_tokens, static_cast<int>(ceilf(mean * (1.0f + 0.5f / n))));
  if (longest <= max(part_tokens, rule.whole_tokens)) return {number, 0, 1, num_seqs};

  const int share = ceil_div(num_seqs, kWarpSize);  // consecutive sequences of a lane
  const auto parts_of = [&](int i) {
    const int seq = lane * share + i;
    if (seq >= num_seqs) return 0;
    const int length = __ldcg(context_lens + seq);
    return length <= rule.whole_tokens ? 1 : ceil_div(length, part_tokens);
  };
  int parts = 0;
#pragma unroll 4
  for (int i = 0; i < share; ++i) parts += parts_of(i);
  int end = parts;  // becomes the number of the first part after this lane's
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int below = __shfl_up_sync(kAllLanes, end, offset);
    if (lane >= offset) end += below;
  }
  int first = end - parts;
  const unsigned owner = __ballot_sync(kAllLanes, first <= number && number < end);
  Part part{0, 0, 0, 0};
#pragma unroll 4
  for (int i = 0; i < share; ++i) {
    const int count = parts_of(i);
    if (first <= number && number < first + count) part = {lane * share + i, number - first, count, 0};
    first += count;
  }
  const int source = __ffs(static_cast<int>(owner)) - 1;  // any lane if there is no such part
  return {__shfl_sync(kAllLanes, part.seq, source), __shfl_sync(kAllLanes, part.index, source),
          __shfl_sync(kAllLanes, part.count, source), __shfl_sync(kAllLanes, end, kWarpSize - 1)};
}

// Takes the next of `total` items that no CTA has; the CTA goes on until it gets one that does not exist. The last to be
// told so leaves the queue at zero, as the next launch expects it. A barrier: shared memory may be used anew afterwards.
__device__ inline int take_item(int32_t* queue, int total, int* shared_item) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const int taken = atomicAdd(queue, 1);
    if (taken == total - 1) *queue = 0;
    *shared_item = gridDim.x + taken;
  }
  __syncthreads();
  return *shared_item;
}

// Counts this CTA's arrival; true in all threads of the last of `arrivals` CTAs, which then sees what the others wrote.
__device__ inline bool is_last_to_arrive(int32_t* counter, int arrivals) {
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
  for (int head = threadIdx.x / kWarpSize; head < num_heads; head += blockDim.x / kWarpSize) {
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

}  // namespace tinyvllm
