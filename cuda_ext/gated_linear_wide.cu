// out[t, i] = silu(sum_k x[t, k] * weight[i, k]) * (sum_k x[t, k] * weight[I + i, k]), fp32 inside, for many tokens t; both
// sums times what a norm ahead says (launch.h).
// x [T, K], weight [2 I, K], out [T, I] of one 16-bit dtype; contiguous.
// Mapping: as linear_wide.cuh has it. A thread has gate and up of the same output: the weights' columns are gate rows,
//   then up rows; or the own rows of a warp are 8 of gate and the 8 of up that go with them.
// Traffic: 4 T I K flop, bound by the tensor cores (and their power).
// Limits: bf16 or fp16; I and K multiples of 8; compute capability 9.0.
#include "linear_wide_norm.cuh"

#pragma nv_diag_suppress 177  // unused: elsewhere than on sm_90a the kernel is empty

namespace tinyvllm {
namespace wide {
namespace {

constexpr int kPanelFeatures = kTileColumns;  // the way out is through panels of so many features
constexpr int kMaxTokens = 512;               // up to which x may be shared

template <typename Form>
struct Shared {
  // Weights shared: a panel of 16 tokens of each half of a warp's features. Else one of all tokens.
  static constexpr int kPanelBytes = kTileRowBytes * (Form::kWeightsShared ? kWarpRows : Form::kColumns);
  static constexpr int kPanels =
      Form::kWeightsShared ? Form::kMultiplierWarps * Form::kColumns / 2 / kPanelFeatures : 1;

  Ring<Form, kMaxBytes - kPanels * kPanelBytes> ring;
  alignas(kTileAlignment) uint8_t out[kPanels][kPanelBytes];
  // Of the tile's tokens: times kSiluExponent, and squared.
  float2 scales[Form::kWeightsShared ? Form::kOwn : Form::kColumns];
};

// silu(scale * gate) * scale * up.
__device__ __forceinline__ float silu_mul(float gate, float up, float2 scale) {
  return gate * inverse_of_power(gate * scale.x) * up * scale.y;
}

// Stores what a warp has of a tile: 16 tokens.
template <typename T, typename Form>
__device__ __forceinline__ void store_tokens(const CUtensorMap& map, Shared<Form>& s, const Walk& tile,
                                             const float (&sums)[Form::kColumns / 2]) {
  constexpr int features = Form::kColumns / 2;
  constexpr int panels = features / kPanelFeatures;
  const float* gate = sums;
  const float* up = sums + features / 2;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int row = lane % kWarpRows;
  if (lane == 0) wait_for_stores<0>();  // of the tile before
  __syncwarp();
  const float2 scales[2] = {s.scales[own_row()], s.scales[own_row() + 8]};
#pragma unroll
  for (int j = 0; j < features / 8; j += 2) {  // 16 features
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int at = 4 * j + i;
      const float2 scale = scales[i / 2 % 2];
      words[i / 2] = pack2<T>(silu_mul(gate[at], up[at], scale), silu_mul(gate[at + 1], up[at + 1], scale));
    }
    const uint32_t panel = shared_address(s.out[warp * panels + j * 8 / kPanelFeatures]);
    const int piece = j % 8 + lane / kWarpRows;
    store_matrices(panel + row * kTileRowBytes + (piece ^ row % 8) * 16, words);
  }
  publish_to_async();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < panels; ++i) {
      store_tile(map, tile.token + warp * kWarpRows, tile.feature + i * kPanelFeatures,
                 shared_address(s.out[warp * panels + i]));
    }
  }
}

// Stores what the CTA has of a tile, each warp 8 features of all tokens.
template <typename T, typename Form>
__device__ __forceinline__ void store_features(const CUtensorMap& map, Shared<Form>& s, const Walk& tile,
                                               const float (&sums)[Form::kColumns / 2]) {
  const int row = threadIdx.x % 16;
  const int warp = threadIdx.x / kWarpSize;
  const uint32_t target = shared_address(s.out[0]) + row * kTileRowBytes + (warp ^ row % 8) * 16;
  if (threadIdx.x == 0) wait_for_stores<0>();  // of the tile before
  named_barrier(1, Form::kMultipliers);
#pragma unroll
  for (int half = 0; half < Form::kColumns; half += Form::kColumns / 2) {
    uint32_t words[Form::kColumns / 16];  // all of them ahead of the stores, which no load can pass
#pragma unroll
    for (int i = 0; i < Form::kColumns / 16; ++i) {
      const float* four = sums + half / 2 + 4 * i;
      const float2* scale = s.scales + half + 8 * i + first_column();
      words[i] = pack2<T>(silu_mul(four[0], four[2], scale[0]), silu_mul(four[1], four[3], scale[1]));
    }
#pragma unroll
    for (int i = 0; i < Form::kColumns / 16; i += 2) {
      store_matrices_transposed(target + (half + 8 * i) * kTileRowBytes, words[i], words[i + 1]);
    }
  }
  publish_to_async();
  named_barrier(1, Form::kMultipliers);
  if (threadIdx.x == 0) store_tile(map, tile.token, tile.feature, shared_address(s.out[0]));
}

template <typename T, typename Form>
__global__ __launch_bounds__(Form::kThreads, 1) void gated_linear_wide_kernel(
    const __grid_constant__ CUtensorMap out_map, const RowScale scale, const __grid_constant__ CUtensorMap x_map,
    const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ Work work) {
  if constexpr (kHopperCode) {
    extern __shared__ __align__(kTileAlignment) uint8_t shared_bytes[];
    Shared<Form>& s = *reinterpret_cast<Shared<Form>*>(shared_bytes);
    static_assert(sizeof(s) <= 227 * 1024);
    multiply_tiles<T>(
        s.ring, x_map, weight_map, work, Part(work),
        [&](const Walk& tile, const float (&sums)[Form::kColumns / 2]) {
          if constexpr (Form::kWeightsShared) {
            store_tokens<T, Form>(out_map, s, tile, sums);
          } else {
            store_features<T, Form>(out_map, s, tile, sums);
          }
        },
        [&](const Walk& tile) {
          read_scales<Form>(scale, tile, [&](int token, float value) {
            s.scales[token] = make_float2(kSiluExponent * value, value * value);
          });
        });
    if (threadIdx.x % kWarpSize == 0) wait_for_stores<0>();
  }
}

// Calls launch(form), in the form that takes the least time: rounds of all pairs of SMs, by tokens of a round.
template <int... columns, typename Launch>
cudaError_t dispatch_form(int num_rows, int out_features, const Launch& launch) {
  const int pairs = std::max(device_attribute(cudaDevAttrMultiProcessorCount, 2) / 2, 1);
  const auto time = [&](int tokens) {
    const int64_t tiles = static_cast<int64_t>(ceil_div(num_rows, tokens)) * ceil_div(out_features, kUsualOwn);
    return ceil_div<int64_t>(tiles, pairs) * tokens;
  };
  int64_t best = time(2 * kUsualOwn);
  int tokens = 0;
  const auto consider = [&](int candidate) {
    if (num_rows > kMaxTokens || time(candidate) >= best) return;
    best = time(candidate);
    tokens = candidate;
  };
  (consider(columns), ...);
  cudaError_t result = cudaErrorInvalidValue;
  if (tokens == 0) return launch(Form<true, 256>{});
  (void)((tokens == columns ? (result = launch(Form<false, columns>{}), true) : false) || ...);
  return result;
}

}  // namespace
}  // namespace wide

cudaError_t gated_linear_wide(void* out, const void* x, const void* weight, const int64_t* sums, int num_rows,
                              int out_features, int in_features, float eps, Dtype dtype, cudaStream_t stream) {
  using namespace wide;
  if (!is_supported(x, weight, num_rows, out_features, in_features, out)) return cudaErrorInvalidValue;
  return dispatch_hopper(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_form<160, 192, 224>(num_rows, out_features, [&](auto form) {
      using F = decltype(form);
      CUtensorMap out_map;
      const cudaError_t error =
          describe_matrix(&out_map, out, num_rows, out_features, F::kWeightsShared ? kWarpRows : F::kColumns);
      if (error != cudaSuccess) return error;
      const Work work = plan_work<F>(num_rows, out_features, in_features, true);
      return launch_tiles<F>(gated_linear_wide_kernel<T, F>, sizeof(Shared<F>), x, weight, 2 * out_features,
                             in_features, work, stream, out_map, RowScale(sums, in_features, eps));
    });
  });
}

}  // namespace tinyvllm
