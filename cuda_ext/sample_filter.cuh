// The parts of sample.cu that decide which logits of a row are kept: top-k, then min-p, then top-p. One CTA works on a
// row of 100,000 logits that lies in L2, so the number of passes over it counts. A histogram of evenly wide bins (one
// pass) tells in which few bins the k-th largest logit, or the end of top-p, must lie; the logits of those bins are
// listed in shared memory (one pass); the exact threshold is found by bisection over the list. Whatever is added up is
// an integer (counts, or probabilities in 40-bit fixed point), so that no result depends on the order of the threads.
#pragma once

#include "sample_row.cuh"

namespace tinyvllm {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kBinsPerThread = kBins / kThreads;
constexpr int kMaxCandidates = 4096;

struct Scratch {
  uint64_t warp_totals[kWarps];
  uint64_t segment_weights[kSegments];
  uint64_t found_start;
  int found_item;
  int last_weighted;
  int num_candidates;
  uint32_t bins[kBins];
  uint32_t candidates[kMaxCandidates];
};

template <typename Function>
__device__ __forceinline__ void for_each_logit_of_row(const Row& row, Function function) {
  for_each_logit<kThreads>(row, 0, row.size, threadIdx.x, function);
}

// ---- Exact sums over the CTA; all threads call these ----

// The sum over lower threads; `total` is the sum over all.
__device__ uint64_t cta_scan(uint64_t value, uint64_t& total, Scratch& scratch) {
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  uint64_t inclusive = value;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const uint64_t lower = __shfl_up_sync(kAllLanes, inclusive, offset);
    if (lane >= offset) inclusive += lower;
  }
  __syncthreads();  // the readers of the previous call are done
  if (lane == kWarpSize - 1) scratch.warp_totals[warp] = inclusive;
  __syncthreads();
  uint64_t before = 0;
  total = 0;
#pragma unroll 4
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += scratch.warp_totals[i];
    total += scratch.warp_totals[i];
  }
  return before + inclusive - value;
}

__device__ uint64_t cta_total(uint64_t value, Scratch& scratch) {
  uint64_t total;
  cta_scan(value, total, scratch);
  return total;
}

// Lays items of the given lengths, kItems from each thread, end to end: the item that covers `point`, -1 if none does;
// scratch.found_start is where it starts.
template <int kItems>
__device__ int find_item(const uint64_t (&lengths)[kItems], uint64_t point, Scratch& scratch) {
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) sum += lengths[i];
  if (threadIdx.x == 0) scratch.found_item = -1;
  uint64_t total;
  uint64_t start = cta_scan(sum, total, scratch);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (start <= point && point - start < lengths[i]) {
      scratch.found_item = threadIdx.x * kItems + i;
      scratch.found_start = start;
    }
    start += lengths[i];
  }
  __syncthreads();
  const int item = scratch.found_item;
  __syncthreads();  // all have read it before the next call
  return item;
}

// ---- Thresholds; all threads call these ----

// The largest key t for which the logits of key >= t weigh at least goal(weight of all); it lies in bins first to last.
template <typename Weight, typename Goal>
__device__ uint32_t find_threshold(const Row& row, int first, int last, Weight weight, Goal goal, Scratch& scratch) {
  uint64_t in_bracket = 0;
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    if (bin >= first && bin <= last) in_bracket += scratch.bins[bin];
  }
  const int num_candidates = static_cast<int>(cta_total(in_bracket, scratch));
  const bool listed = num_candidates <= kMaxCandidates;  // else many logits are (nearly) equal: read all of them again
  if (threadIdx.x == 0) scratch.num_candidates = 0;
  __syncthreads();

  uint64_t above = 0;
  uint64_t all = 0;
  for_each_logit_of_row(row, [&](float logit) {
    const uint64_t w = weight(logit);
    const int bin = row.bin(logit);
    all += w;
    if (bin < first) above += w;
    if (listed && bin >= first && bin <= last) {
      scratch.candidates[atomicAdd(&scratch.num_candidates, 1)] = key_of(logit);
    }
  });
  above = cta_total(above, scratch);  // its barriers also complete the list
  const uint64_t wanted = goal(cta_total(all, scratch));

  uint32_t threshold = 0;
#pragma unroll 1
  for (uint32_t bit = 0x80000000u; bit > 0; bit >>= 1) {
    const uint32_t trial = threshold | bit;
    uint64_t reached = 0;
    if (listed) {
      for (int i = threadIdx.x; i < num_candidates; i += kThreads) {
        const uint32_t key = scratch.candidates[i];
        if (key >= trial) reached += weight(value_of(key));
      }
    } else {
      for_each_logit_of_row(row, [&](float logit) {
        const int bin = row.bin(logit);
        if (bin >= first && bin <= last && key_of(logit) >= trial) reached += weight(logit);
      });
    }
    if (above + cta_total(reached, scratch) >= wanted) threshold = trial;
  }
  return threshold;
}

__device__ __forceinline__ uint64_t share_of(float top_p, uint64_t total) {
  const double share = ceil(static_cast<double>(top_p) * static_cast<double>(total));
  return share < 1.0 ? 1 : static_cast<uint64_t>(share);
}

// The bins in which top-p may end. The edges of a bin bound what its logits weigh; the margins cover rounding. Of the
// bins after `lowest_bin` nothing is kept, and of it perhaps a part.
__device__ void bracket_top_p(const Row& row, float top_p, int lowest_bin, int& first, int& last, Scratch& scratch) {
  uint64_t at_least[kBinsPerThread], at_most[kBinsPerThread];
  uint64_t all_at_least = 0;
  uint64_t all_at_most = 0;
  const float octaves_per_bin = row.scale / row.bins_per_unit;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    const int bin = threadIdx.x * kBinsPerThread + i;
    const float low = exp2f(-(static_cast<float>(bin) + 1.01f) * octaves_per_bin) * 0.9999f;
    const float high = fminf(exp2f(-(static_cast<float>(bin) - 0.01f) * octaves_per_bin) * 1.0001f, 1.0f);
    const bool bounded = bin < kBins - 1;  // the last bin may hold much smaller logits
    const uint64_t count = scratch.bins[bin];
    at_least[i] = bounded && bin < lowest_bin && low >= row.min_p ? count * __float2ull_rd(low * kOne) : 0;
    at_most[i] = bin <= lowest_bin && high >= row.min_p ? count * __float2ull_ru(high * kOne) : 0;
    all_at_least += at_least[i];
    all_at_most += at_most[i];
  }
  all_at_least = cta_total(all_at_least, scratch);
  all_at_most = cta_total(all_at_most, scratch);
  first = find_item(at_most, share_of(top_p, all_at_least) - 1, scratch);
  last = find_item(at_least, share_of(top_p, all_at_most) - 1, scratch);
  if (last < 0) last = kBins - 1;
}

// Sets row.lowest_key so that top-k (0: off) and top-p (1: off) are obeyed, min-p (in row.min_p) between them; logits
// that equal the last one kept are kept. `smallest` is the smallest finite logit.
__device__ void filter(Row& row, float smallest, int top_k, float top_p, Scratch& scratch) {
  const float span = row.largest - smallest;
  row.bins_per_unit = span > 0.0f && span <= FLT_MAX ? static_cast<float>(kBins - 1) / span : 1.0f;
  for (int i = threadIdx.x; i < kBins; i += kThreads) scratch.bins[i] = 0;
  __syncthreads();
  for_each_logit_of_row(row, [&](float logit) { atomicAdd(&scratch.bins[row.bin(logit)], 1u); });
  __syncthreads();

  int lowest_bin = kBins;
  if (top_k > 0) {
    uint64_t counts[kBinsPerThread];
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) counts[i] = scratch.bins[threadIdx.x * kBinsPerThread + i];
    lowest_bin = find_item(counts, top_k - 1, scratch);
    row.lowest_key = find_threshold(
        row, lowest_bin, lowest_bin, [](float) { return uint64_t{1}; },
        [&](uint64_t) { return static_cast<uint64_t>(top_k); }, scratch);
  }
  if (top_p < 1.0f) {
    int first, last;
    bracket_top_p(row, top_p, lowest_bin, first, last, scratch);
    const uint32_t threshold = find_threshold(
        row, first, last, [&](float logit) { return row.weight(logit); },
        [&](uint64_t all) { return share_of(top_p, all); }, scratch);
    row.lowest_key = max(row.lowest_key, threshold);
  }
}

}  // namespace
}  // namespace tinyvllm
