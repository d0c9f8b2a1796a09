// How attention_decode cuts the contexts of a batch into parts of about equal length, counted on the device, how its CTAs
// take them (the first gridDim.x by number, what uneven contexts have beyond from a queue), and how parts are merged.
#pragma once

#include "attention.cuh"

namespace tinyvllm {

constexpr float kEven = 1.25f;   // contexts are uneven if one is longer than this many times the mean,
constexpr float kWhole = 2.25f;  // or than this many if each may stay whole: about as much as its warps read meanwhile

// A part of a sequence's context: part `index` of `count`. Parts are numbered through all sequences up to `total`.
struct Part {
  int seq;
  int index;
  int count;
  int total;
};

struct PartRule {
  int even_parts;    // of each of nearly equal contexts, at most; 0: nothing is ever cut
  int max_parts;     // of a mean context, if contexts are uneven
  int whole_tokens;  // contexts up to this are never cut: merging would cost more
  int min_tokens;    // of a part
};

// A context is cut into ceil(length / part_tokens) parts. If none is much longer than the mean, part_tokens is the mean /
// even_parts and half a part's even_parts-th more, so that nearly equal contexts give even_parts each, or fewer where
// parts would be so short that merging them costs more than it saves; else it is the mean / max_parts: the parts that the
// queue holds fill the gaps that the first ones leave. So there are never more than num_seqs * (max_parts + 1). All lanes
// of a warp call it and get the same result. It reads past L1, so that it may run before wait_for_previous_kernel().
__device__ inline Part find_part(const int32_t* context_lens, int num_seqs, const PartRule& rule, int number) {
  constexpr int held = 8;  // lengths in registers: enough for 256 sequences
  if (rule.even_parts == 0) return {number, 0, 1, num_seqs};
  const int lane = threadIdx.x % kWarpSize;
  int lengths[held];  // of sequences lane, lane + 32 ...
#pragma unroll
  for (int i = 0; i < held; ++i) {
    if (i * kWarpSize >= num_seqs) break;
    lengths[i] = lane + i * kWarpSize < num_seqs ? __ldcg(context_lens + lane + i * kWarpSize) : 0;
  }
  const auto for_each_seq = [&](auto&& visit) {
#pragma unroll
    for (int i = 0; i < held; ++i) {
      if (i * kWarpSize >= num_seqs) break;
      if (lane + i * kWarpSize < num_seqs) visit(lane + i * kWarpSize, lengths[i]);
    }
    for (int seq = lane + held * kWarpSize; seq < num_seqs; seq += kWarpSize) visit(seq, __ldcg(context_lens + seq));
  };

  unsigned tokens = 0;
  unsigned contexts = 0;
  int longest = 0;
  for_each_seq([&](int, int length) {
    tokens += length;
    contexts += length > 0 ? 1 : 0;
    longest = max(longest, length);
  });
  tokens = __reduce_add_sync(kAllLanes, tokens);
  contexts = __reduce_add_sync(kAllLanes, contexts);
  longest = __reduce_max_sync(kAllLanes, longest);
  const float mean = __fdividef(tokens, max(contexts, 1u));
  if (rule.even_parts == 1 && longest <= kWhole * mean) return {number, 0, 1, num_seqs};
  const bool even = longest <= kEven * mean;
  const float shortest = fmaxf(rule.min_tokens + mean * (1.0f / 32.0f), 128.0f * contexts);
  const float long_enough = fmaxf(floorf(__fdividef(mean, shortest)), 1.0f);
  const float parts_wanted = even ? fminf(rule.even_parts, long_enough) : rule.max_parts;
  float share = __fdividef(mean, parts_wanted);
  if (even) share += __fdividef(0.5f * share, parts_wanted);
  const int part_tokens = max(even ? 0 : rule.whole_tokens, static_cast<int>(ceilf(share)));
  if (longest <= max(part_tokens, rule.whole_tokens)) return {number, 0, 1, num_seqs};
  const float factor = 1.0f / part_tokens;
  const auto parts_of = [&](int length) {
    return length <= rule.whole_tokens ? 1 : static_cast<int>(ceilf(length * factor));
  };

  // The parts of all sequences of a lane come before those of the next lane.
  int parts = 0;
  for_each_seq([&](int, int length) { parts += parts_of(length); });
  int end = parts;  // becomes the number of the first part after this lane's
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int below = __shfl_up_sync(kAllLanes, end, offset);
    if (lane >= offset) end += below;
  }
  int first = end - parts;
  const unsigned owner = __ballot_sync(kAllLanes, first <= number && number < end);
  Part part{0, 0, 0, 0};
  for_each_seq([&](int seq, int length) {
    const int count = parts_of(length);
    if (first <= number && number < first + count) part = {seq, number - first, count, 0};
    first += count;
  });
  const int source = __ffs(static_cast<int>(owner)) - 1;  // any lane if there is no such part
  return {__shfl_sync(kAllLanes, part.seq, source), __shfl_sync(kAllLanes, part.index, source),
          __shfl_sync(kAllLanes, part.count, source), __shfl_sync(kAllLanes, end, kWarpSize - 1)};
}

// Takes the next of `total` items that no CTA has; the CTA goes on until it gets one that does not exist. The last of
// `total` + all CTAs to ask leaves the queue at zero, as the next launch expects it. A barrier: shared memory may be used
// anew afterwards.
__device__ inline int take_item(int32_t* queue, int total, int* shared_item) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const int taken = atomicAdd(queue, 1);
    if (taken == total + static_cast<int>(gridDim.x * gridDim.y * gridDim.z) - 1) *queue = 0;
    *shared_item = taken;
  }
  __syncthreads();
  return *shared_item;
}

// Adds 1 and returns what was there. What this thread knows to be written before is seen by whom a later one is returned.
__device__ __forceinline__ int32_t arrive(int32_t* counter) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Counts this CTA's arrival; true in all threads of the last of `arrivals` CTAs, which then sees what the others wrote.
__device__ inline bool is_last_to_arrive(int32_t* counter, int arrivals) {
  bool last = false;
  __syncthreads();  // all stores of this CTA come before the arrival
  if (threadIdx.x == 0) {
    last = arrive(counter) == arrivals - 1;
    if (last) *counter = 0;  // as the next launch expects it
  }
  return __syncthreads_or(last);
}

// Merges the parts of one context in their order, a warp per query head. Part i is at values + i * values_stride.
template <typename T, int head_dim>
__device__ void merge_parts(T* out, const float* values, int64_t values_stride, const float2* stats,
                            int64_t stats_stride, int num_parts, int num_heads) {
  constexpr int chunk = 16;  // parts whose values and stats are on their way at a time
  constexpr int pairs = head_dim / 64;
  const int lane = threadIdx.x % kWarpSize;
  for (int head = threadIdx.x / kWarpSize; head < num_heads; head += blockDim.x / kWarpSize) {
    float max = -INFINITY;
    float sum = 0.0f;
    float2 total[pairs] = {};
    for (int begin = 0; begin < num_parts; begin += chunk) {
      float2 stat[chunk];
      float2 value[chunk][pairs];
#pragma unroll
      for (int i = 0; i < chunk; ++i) {
        const int part = begin + i;
        stat[i] = part < num_parts ? __ldcg(stats + part * stats_stride + head) : make_float2(-INFINITY, 0.0f);
#pragma unroll
        for (int d = 0; d < pairs; ++d) {
          const float* source = values + part * values_stride + head * head_dim + d * 64 + 2 * lane;
          value[i][d] =
              part < num_parts ? __ldcg(reinterpret_cast<const float2*>(source)) : make_float2(0.0f, 0.0f);
        }
      }
      float new_max = max;
#pragma unroll
      for (int i = 0; i < chunk; ++i) new_max = fmaxf(new_max, stat[i].x);
      const float correction = fast_exp2(max - new_max);
      max = new_max;
      sum *= correction;
#pragma unroll
      for (int d = 0; d < pairs; ++d) total[d] = make_float2(total[d].x * correction, total[d].y * correction);
#pragma unroll
      for (int i = 0; i < chunk; ++i) {
        const float weight = fast_exp2(stat[i].x - max);
        sum += weight * stat[i].y;
#pragma unroll
        for (int d = 0; d < pairs; ++d) {
          total[d].x += weight * value[i][d].x;
          total[d].y += weight * value[i][d].y;
        }
      }
    }
#pragma unroll
    for (int d = 0; d < pairs; ++d) {
      *reinterpret_cast<uint32_t*>(out + head * head_dim + d * 64 + 2 * lane) =
          pack2<T>(total[d].x / sum, total[d].y / sum);
    }
  }
}

}  // namespace tinyvllm
