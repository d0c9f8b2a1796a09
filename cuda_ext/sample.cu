// The largest logit; or the first index at which the kept exp(logit / temperature) add up to more than u of their sum;
// or -1, and 0 for the next step, where a logit is NaN or the largest of them infinite.
// logits float [R, V], contiguous; parameters by rows[i]; u in (0, 1) is Philox4x32-10 of (seed, position).
// Grid: (parts of a row, row). Warps summarise 256 segments of a row; the last CTA of a row to finish draws its token.
// Traffic: 4 R V bytes. Top-k, top-p, or both read their row 4, 4 or 6 times more, by one CTA; min-p alone once more.
// Limits: V up to 2^22. A segment is summed in fixed order, all else is exact in fixed point: runs are bit-equal.
#include "sample_filter.cuh"

namespace tinyvllm {
namespace {

constexpr int kCtasPerSm = 2;

// scratch.segment_weights = the kept weight of each segment, from all of its logits.
__device__ void weigh_segments(const Row& row, Scratch& scratch) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (int segment = threadIdx.x / kWarpSize; segment < kSegments; segment += kWarps) {
    const int begin = segment * row.segment_size;
    uint64_t sum = 0;
    for_each_logit<kWarpSize>(row, begin, min(begin + row.segment_size, row.size), lane,
                              [&](float logit) { sum += row.weight(logit); });
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    if (lane == 0) scratch.segment_weights[segment] = sum;
  }
}

// The token that covers u of the kept weight, or -1 if there is no weight.
__device__ int draw(const Row& row, double u, Scratch& scratch) {
  const uint64_t lengths[1] = {threadIdx.x < kSegments ? scratch.segment_weights[threadIdx.x] : 0};
  uint64_t point = static_cast<uint64_t>(u * static_cast<double>(cta_total(lengths[0], scratch)));
  const int segment = find_item(lengths, point, scratch);
  if (segment < 0) return -1;
  point -= scratch.found_start;
  if (threadIdx.x == 0) scratch.last_weighted = -1;
  const int end = min((segment + 1) * row.segment_size, row.size);
  for (int first = segment * row.segment_size; first < end; first += kThreads) {
    const int index = first + static_cast<int>(threadIdx.x);
    const uint64_t weights[1] = {index < end ? row.weight(row.logits[index]) : 0};
    const int item = find_item(weights, point, scratch);
    if (item >= 0) return first + item;
    if (weights[0] > 0) atomicMax(&scratch.last_weighted, index);
    point -= cta_total(weights[0], scratch);
  }
  __syncthreads();
  return scratch.last_weighted;  // the rounded sum of the segment exceeds the sum of its weights
}

__global__ __launch_bounds__(kThreads, kCtasPerSm) void sample_kernel(
    int32_t* sampled, int32_t* last_tokens, const float* logits, const int32_t* rows, const int32_t* positions,
    const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p, const int64_t* seeds,
    Summary* summaries, int32_t* counters, int vocab_size) {
  __shared__ Scratch scratch;
  __shared__ uint64_t warp_rank[kWarps];
  __shared__ float warp_smallest[kWarps];
  __shared__ bool is_last;
  allow_next_kernel();
  wait_for_previous_kernel();

  const int i = blockIdx.y;
  const int sequence_row = rows[i];
  if (sequence_row < 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0) sampled[i] = -1;
    return;
  }
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  Row row;
  row.logits = logits + static_cast<int64_t>(i) * vocab_size;
  row.size = vocab_size;
  row.segment_size = segment_size(vocab_size);
  row.scale = scale_of(temperature[sequence_row]);
  Summary* row_summaries = summaries + static_cast<int64_t>(i) * kSegments;
  for (int segment = blockIdx.x * kWarps + warp; segment < kSegments; segment += gridDim.x * kWarps) {
    const Summary summary = summarise(row, segment);
    if (lane == 0) row_summaries[segment] = summary;
  }

  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(counters + i, 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (threadIdx.x == 0) counters[i] = 0;

  Summary mine = {-INFINITY, FLT_MAX, 0.0f, vocab_size};
  if (threadIdx.x < kSegments) {
    const float4 loaded = __ldcg(reinterpret_cast<const float4*>(row_summaries + threadIdx.x));
    mine = {loaded.x, loaded.y, loaded.z, __float_as_int(loaded.w)};
  }
  uint64_t rank = warp_max_rank(rank_of(mine.largest, mine.argmax));
  float smallest = -warp_max(-mine.smallest);
  if (lane == 0) {
    warp_rank[warp] = rank;
    warp_smallest[warp] = smallest;
  }
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) {
    rank = max(rank, warp_rank[w]);
    smallest = fminf(smallest, warp_smallest[w]);
  }

  int token = token_of_rank(rank);
  if (token >= 0 && row.scale > 0.0f) {
    row.largest = value_of_rank(rank);
    row.min_p = min_p[sequence_row];
    const int k = top_k[sequence_row] < vocab_size ? top_k[sequence_row] : 0;
    const float p = top_p[sequence_row];
    if (k > 0 || p < 1.0f) filter(row, smallest, k, p, scratch);
    if (k > 0 || p < 1.0f || row.min_p > 0.0f) {
      weigh_segments(row, scratch);
    } else if (threadIdx.x < kSegments) {
      scratch.segment_weights[threadIdx.x] = __float2ull_rn(mine.sum * row.probability(mine.largest) * kOne);
    }
    __syncthreads();
    const int drawn = draw(row, uniform(seeds[sequence_row], positions[i]), scratch);
    token = drawn >= 0 ? drawn : token;
  }
  if (threadIdx.x == 0) {
    sampled[i] = token;
    last_tokens[sequence_row] = max(token, 0);
  }
}

}  // namespace

int sample_workspace_floats() { return kSegments * static_cast<int>(sizeof(Summary) / sizeof(float)); }

cudaError_t sample(int32_t* sampled, int32_t* last_tokens, const float* logits, const int32_t* rows,
                   const int32_t* positions, const float* temperature, const int32_t* top_k, const float* top_p,
                   const float* min_p, const int64_t* seeds, float* workspace, int32_t* counters, int num_rows,
                   int vocab_size, cudaStream_t stream) {
  const bool supported = num_rows >= 0 && num_rows <= 65535 && vocab_size > 0 && vocab_size <= kMaxVocab &&
                         is_aligned16(logits) && is_aligned16(workspace);
  if (!supported) return cudaErrorInvalidValue;
  if (num_rows == 0) return cudaSuccess;
  const int parts = kCtasPerSm * device_attribute(cudaDevAttrMultiProcessorCount, 1) / num_rows;
  const int most_parts = kSegments / kWarps;
  return launch(sample_kernel, dim3(parts < 1 ? 1 : parts < most_parts ? parts : most_parts, num_rows), kThreads, 0,
                stream, sampled, last_tokens, logits, rows, positions, temperature, top_k, top_p, min_p, seeds,
                reinterpret_cast<Summary*>(workspace), counters, vocab_size);
}

}  // namespace tinyvllm
