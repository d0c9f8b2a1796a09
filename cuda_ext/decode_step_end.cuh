// How decode_step ends: the CTAs join what they know of the largest logit, rows with a temperature draw their token as
// `sample` does, and the state advances.
#pragma once

#include "decode_step.cuh"

namespace tinyvllm {

// All multiplying threads call it: who sees a CTA's arrival sees what its threads wrote. How many had come before.
__device__ __forceinline__ int arrive_in_grid(StepHeader* header, StepShared& s) {
  __threadfence();
  named_barrier(1, kStepThreads);
  if (threadIdx.x == 0) {
    s.arrival = atomicAdd(&header->arrivals, 1);
    __threadfence();
  }
  named_barrier(1, kStepThreads);
  return s.arrival;
}

template <typename T>
__device__ __forceinline__ Row row_of(const StepArguments<T>& a, const StepShared& s, int i) {
  return {a.logits + static_cast<int64_t>(i) * a.vocab_size, a.vocab_size, segment_size(a.vocab_size), s.scale[i]};
}

// Of the rows that draw: the warps of the grid take segments in turn, once all logits are there.
template <typename T>
__device__ __forceinline__ void summarise_rows(const StepArguments<T>& a, const StepShared& s, Summary* summaries,
                                               const Patience& patience) {
  if (threadIdx.x == 0) {
#pragma unroll 1
    while (static_cast<int>(load4_relaxed(&patience.header->arrivals)) < static_cast<int>(gridDim.x) &&
           !patience.is_over()) {
    }
    __threadfence();
  }
  named_barrier(1, kStepThreads);
  const int first = blockIdx.x + threadIdx.x / kWarpSize * gridDim.x;
  for (int i = first; i < a.num_rows * kSegments; i += kStepWarps * gridDim.x) {
    if (s.scale[i / kSegments] == 0.0f) continue;
    const Summary summary = summarise(row_of(a, s, i / kSegments), i % kSegments);
    if (threadIdx.x % kWarpSize == 0) summaries[i] = summary;
  }
}

// Lays the lengths of all lanes end to end, kCount of each: the one that covers `point`, -1 if none does, and where it
// starts; in all lanes.
struct Covering {
  int index;
  uint64_t start;
};

template <int kCount>
__device__ __forceinline__ Covering find_covering(const uint64_t (&lengths)[kCount], uint64_t point) {
  const int lane = threadIdx.x % kWarpSize;
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += lengths[i];
  uint64_t end = sum;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const uint64_t lower = __shfl_up_sync(kAllLanes, end, offset);
    if (lane >= offset) end += lower;
  }
  uint64_t start = end - sum;
  Covering found{-1, 0};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (start <= point && point - start < lengths[i]) found = {lane * kCount + i, start};
    start += lengths[i];
  }
  const uint32_t finders = __ballot_sync(kAllLanes, found.index >= 0);
  const int finder = finders != 0 ? __ffs(static_cast<int>(finders)) - 1 : 0;
  return {__shfl_sync(kAllLanes, found.index, finder), __shfl_sync(kAllLanes, found.start, finder)};
}

// The token that covers u of the row's weight, by one warp; -1 if there is no weight.
__device__ __forceinline__ int draw_by_warp(const Row& row, const Summary* summaries, double u) {
  constexpr int each = kSegments / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  uint64_t lengths[each];
  uint64_t all = 0;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const Summary summary = summaries[lane * each + i];
    lengths[i] = __float2ull_rn(summary.sum * row.probability(summary.largest) * kOne);
    all += lengths[i];
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) all += __shfl_xor_sync(kAllLanes, all, offset);
  uint64_t point = static_cast<uint64_t>(u * static_cast<double>(all));
  const Covering segment = find_covering(lengths, point);
  if (segment.index < 0) return -1;
  point -= segment.start;
  const int run = row.segment_size / kWarpSize;  // of a lane
  const int begin = segment.index * row.segment_size;
  uint64_t weight[1] = {0};
  int last_weighted = -1;
  for (int i = begin + lane * run; i < min(begin + (lane + 1) * run, row.size); ++i) {
    const uint64_t w = row.weight(row.logits[i]);
    if (w > 0) last_weighted = i;
    weight[0] += w;
  }
  const Covering found = find_covering(weight, point);
  if (found.index < 0) {  // the rounded sum of the segment exceeds the sum of its weights
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      last_weighted = max(last_weighted, __shfl_xor_sync(kAllLanes, last_weighted, offset));
    }
    return last_weighted;
  }
  point -= found.start;
  int index = begin + found.index * run;
  for (uint64_t w = row.weight(row.logits[index]); point >= w; w = row.weight(row.logits[++index])) point -= w;
  return index;
}

// By warp i of the CTA that came last: all have read the state.
template <typename T>
__device__ __forceinline__ void advance_row(const StepArguments<T>& a, const StepShared& s, StepHeader* header,
                                            const Summary* summaries, int i) {
  const int lane = threadIdx.x % kWarpSize;
  const int row = s.row[i];
  uint64_t best = lane == 0 ? atomicExch(&header->best[i], 0ull) : 0;
  best = __shfl_sync(kAllLanes, best, 0);
  int token = -1;
  if (a.temperature != nullptr && row >= 0) {
    token = token_of_rank(best);
    if (token >= 0 && s.scale[i] > 0.0f) {
      Row logits = row_of(a, s, i);
      logits.largest = value_of_rank(best);
      const int drawn = draw_by_warp(logits, summaries + i * kSegments, uniform(a.seeds[row], s.length[i]));
      token = drawn >= 0 ? drawn : token;
    }
  }
  if (lane == 0) {
    a.context_lens[i] = s.length[i];
    if (row >= 0) a.next_positions[i] = s.length[i];
    if (a.temperature != nullptr) {
      a.sampled[i] = token;
      if (row >= 0) a.last_tokens[row] = max(token, 0);
      if (s.told != nullptr) s.told[i] = token;
    }
  }
}

template <typename T>
__device__ __forceinline__ void end_step(const StepArguments<T>& a, StepShared& s, uint64_t best_of_thread,
                                         uint64_t* bests, const Patience& patience) {
  StepHeader* header = patience.header;
  Summary* summaries = reinterpret_cast<Summary*>(a.workspace + kHeaderWords - kMaxStepRows * kSummaryWords);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  named_barrier(1, kStepThreads);
  bests[threadIdx.x] = best_of_thread;
  named_barrier(1, kStepThreads);
  if (warp < a.num_rows && a.temperature != nullptr) {
    uint64_t best = 0;
    for (int i = lane; i < kStepThreads; i += kWarpSize) {
      if (i / 4 % a.num_rows == warp) best = max(best, bests[i]);
    }
    best = warp_max_rank(best);
    if (lane == 0) atomicMax(&header->best[warp], static_cast<unsigned long long>(best));
  }
  int last = gridDim.x - 1;
  int arrival = arrive_in_grid(header, s);
  if (s.draws) {
    summarise_rows(a, s, summaries, patience);
    last += gridDim.x;
    arrival = arrive_in_grid(header, s);
  }
  if (arrival != last) return;
  if (warp < a.num_rows) advance_row(a, s, header, summaries, warp);
  if (threadIdx.x == 0) {
    header->arrivals = 0;
    header->written[s.steps % 2] = static_cast<int32_t>(a.exchange.layer_words * a.num_layers);
    header->steps += 1;
  }
}

}  // namespace tinyvllm
