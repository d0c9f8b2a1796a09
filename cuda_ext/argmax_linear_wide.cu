// argmax_linear_hopper for 129 to 256 rows: ranks[m] tells the n with the largest sum_k x[m, k] * weight[n, k].
// x [M, K], weight [N, K] of one 16-bit dtype, contiguous. ranks uint64 [M] holds each row's best so far.
// Mapping: as linear_wide.cuh has it; x is shared by up to 192 rows. A thread keeps its best of each row to the end.
// Traffic: 2 M N K flop and 2 N K bytes of weights, near both bounds.
// Limits: bf16 or fp16; K a multiple of 8; compute capability 9.0.
#include "argmax.cuh"
#include "linear_wide.cuh"

#pragma nv_diag_suppress 177  // unused: elsewhere than on sm_90a the kernel is empty

namespace tinyvllm {
namespace wide {
namespace {

constexpr int kMaxTiles = 128;  // of a CTA when x is shared: a byte tells one of them and one of two features

template <typename Form>
struct Shared {
  Ring<Form> ring;
};

// The best of a thread's tokens: two, all features of a tile are its columns.
template <typename Form>
struct Best {
  float logits[2] = {-INFINITY, -INFINITY};
  int features[2] = {};

  __device__ __forceinline__ explicit Best(Shared<Form>&) {}

  __device__ __forceinline__ void take(const Walk& tile, const float (&sums)[Form::kColumns / 2]) {
#pragma unroll
    for (int i = 0; i < Form::kColumns / 2; ++i) {
      const int feature = tile.feature + first_column() + i / 4 * 8 + i % 2;
      const int u = i / 2 % 2;
      if (feature < tile.work.num_features) {
        features[u] = sums[i] > logits[u] ? feature : features[u];
        logits[u] = max_or_nan(logits[u], sums[i]);
      }
    }
  }
  __device__ __forceinline__ void merge(Rank* ranks, const Work& work, const Part& part) const {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const Rank rank = max_rank_of_lanes<1, 4>(rank_of(logits[u], features[u]));
      const int row = part.half * work.tiling.to_token + own_row() + 8 * u;  // in all tiles the same
      if (threadIdx.x % 4 == 0 && row < work.num_rows) atomicMax(ranks + row, rank);
    }
  }
};

template <int columns>
struct Shared<Form<false, columns>> {
  static constexpr int kThreads = Form<false, columns>::kMultipliers;
  static constexpr int kWarps = Form<false, columns>::kMultiplierWarps;
  static constexpr int kOtherBytes = columns / 4 * kThreads + kWarps * columns * 8;

  Ring<Form<false, columns>, kMaxBytes - kOtherBytes> ring;
  uint8_t codes[columns / 4][kThreads];
  Rank ranks[kWarps][columns];
};

// The best of a thread's tokens: a quarter of the columns, two features of a tile are its own. Of each, a code in
// shared memory tells 2 * the tile's number + which of the features it is.
template <int columns>
struct Best<Form<false, columns>> {
  Shared<Form<false, columns>>& s;
  float logits[columns / 4];  // of column 8 j + 2 q + v at 2 j + v
  int number = 0;             // of tiles so far

  __device__ __forceinline__ explicit Best(Shared<Form<false, columns>>& shared) : s(shared) {
#pragma unroll
    for (float& logit : logits) logit = -INFINITY;
  }
  __device__ __forceinline__ void take(const Walk& tile, const float (&sums)[columns / 2]) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (tile.feature + own_row() + 8 * u >= tile.work.num_features) break;
#pragma unroll
      for (int i = 0; i < columns / 4; ++i) {
        const float logit = sums[i / 2 * 4 + 2 * u + i % 2];
        if (logit > logits[i]) s.codes[i][threadIdx.x] = static_cast<uint8_t>(2 * number + u);
        logits[i] = max_or_nan(logits[i], logit);
      }
    }
    ++number;
  }
  __device__ __forceinline__ void merge(Rank* ranks, const Work& work, const Part& part) const {
#pragma unroll
    for (int i = 0; i < columns / 4; ++i) {
      const int code = logits[i] > -INFINITY ? s.codes[i][threadIdx.x] : 0;
      const int tile = part.cluster + code / 2 * part.num_clusters;
      const int first = tile * work.tiling.features + part.half * work.tiling.to_feature;
      const Rank rank = max_rank_of_lanes<4, kWarpSize>(rank_of(logits[i], first + own_row() + code % 2 * 8));
      const int column = i / 2 * 8 + first_column() + i % 2;
      if (threadIdx.x % kWarpSize < 4) s.ranks[threadIdx.x / kWarpSize][column] = rank;
    }
    named_barrier(1, s.kThreads);
    if (threadIdx.x >= work.num_rows) return;
    Rank rank = 0;
#pragma unroll
    for (int warp = 0; warp < s.kWarps; ++warp) rank = max_rank(rank, s.ranks[warp][threadIdx.x]);
    atomicMax(ranks + threadIdx.x, rank);
  }
};

template <typename T, typename Form>
__global__ __launch_bounds__(Form::kThreads, 1) void argmax_linear_wide_kernel(Rank* ranks,
                                                                         const __grid_constant__ CUtensorMap x_map,
                                                                         const __grid_constant__ CUtensorMap weight_map,
                                                                         const __grid_constant__ Work work) {
  if constexpr (kHopperCode) {
    extern __shared__ __align__(kTileAlignment) uint8_t shared_bytes[];
    Shared<Form>& s = *reinterpret_cast<Shared<Form>*>(shared_bytes);
    const Part part(work);
    Best<Form> best(s);
    multiply_tiles<T>(s.ring, x_map, weight_map, work, part,
                      [&](const Walk& tile, const float (&sums)[Form::kColumns / 2]) { best.take(tile, sums); });
    if (threadIdx.x < Form::kMultipliers) best.merge(ranks, work, part);
  }
}

// Calls launch(form) in the form for so many rows.
template <typename Launch>
cudaError_t dispatch_form(int num_rows, int out_features, const Launch& launch) {
  const int pairs = device_attribute(cudaDevAttrMultiProcessorCount, 2) / 2;
  const bool can_count = ceil_div(out_features, 2 * kUsualOwn) <= kMaxTiles * pairs;
  if (num_rows <= 160 && can_count) return launch(Form<false, 160>{});
  if (num_rows <= 192 && can_count) return launch(Form<false, 192>{});
  return launch(Form<true, 256>{});
}

}  // namespace
}  // namespace wide

cudaError_t find_best_wide(Rank* ranks, const void* x, const void* weight, int num_rows, int out_features,
                           int in_features, Dtype dtype, cudaStream_t stream) {
  using namespace wide;
  if (num_rows > 2 * kUsualOwn || !is_supported(x, weight, num_rows, out_features, in_features)) {
    return cudaErrorInvalidValue;
  }
  return dispatch_hopper(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_form(num_rows, out_features, [&](auto form) {
      using F = decltype(form);
      const Work work = plan_work<F>(num_rows, out_features, in_features, false);
      return launch_tiles<F>(argmax_linear_wide_kernel<T, F>, sizeof(Shared<F>), x, weight, out_features, in_features,
                             work, stream, ranks);
    });
  });
}

}  // namespace tinyvllm
