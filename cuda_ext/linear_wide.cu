// out[m, n] = sum_k x[m, k] * weight[n, k], or that added to out and rounded once, with a norm ahead or behind (launch.h),
// for 129 to 256 rows, few features and K so short that there is nothing to gain from splitting it.
// x [M, K], weight [N, K], out [M, N] of one 16-bit dtype; contiguous.
// Mapping: as linear_wide.cuh has it: a CTA has one tile of 64 tokens by 64 or 96 features and one warpgroup; two CTAs
//   share the weights.
// Traffic: 2 M N K flop, bound by what shared memory takes in and gives to the tensor cores.
// Limits: bf16 or fp16; K and N multiples of 8; compute capability 9.0.
#include "linear_wide_norm.cuh"

#pragma nv_diag_suppress 177  // unused: elsewhere than on sm_90a the kernel is empty

namespace tinyvllm {
namespace wide {
namespace {

constexpr int kTokens = 64;
constexpr int kRingBytes = 200 * 1024;  // leaves room for CTAs of the next kernel

template <int columns>
using Tile = Form<true, columns, 2, kTokens>;

// A warp's sums, 16 tokens of all columns, go through shared memory, 8 bytes a thread without bank conflicts.
template <int columns>
constexpr int kPitch = columns + 8;

template <int columns>
struct Shared {
  union {
    Ring<Tile<columns>, kRingBytes> ring;
    float sums[kTokens][kPitch<columns>];
  };
  float scales[kTokens];    // by the norm ahead
  uint4 norm[columns / 8];  // weights of the norm behind
};

template <typename T>
struct Plain {
  static constexpr bool kAdds = false;
  T* out;
  RowScale scale;
};

// What a lane has of a tile: every fourth 8 features of two rows.
template <int columns>
constexpr int kPieces = columns / 16;

// Calls function(u, i, piece, exists, offset in out) for each of them.
template <int columns, typename Function>
__device__ __forceinline__ void for_each_piece(const Walk& tile, const Function& function) {
#pragma unroll
  for (int i = 0; i < kPieces<columns>; ++i) {
    const int u = i / (kPieces<columns> / 2);
    const int piece = threadIdx.x % 4 + i % (kPieces<columns> / 2) * 4;
    const int row = tile.token + own_row() + 8 * u;
    const int feature = tile.feature + piece * 8;
    const bool exists = row < tile.work.num_rows && feature < tile.work.num_features;
    function(u, i, piece, exists, static_cast<int64_t>(row) * tile.work.num_features + feature);
  }
}

template <typename T, typename Out, int columns>
__device__ __forceinline__ void store(const Out& to, Shared<columns>& s, const Walk& tile,
                                      const float (&sums)[columns / 2], const uint4 (&old)[kPieces<columns>]) {
  float scales[2];
  float squares[2] = {};
  if constexpr (Out::kAdds) {
    copy_wait<0>();
  } else {
    for (int u = 0; u < 2; ++u) scales[u] = s.scales[own_row() + 8 * u];
  }
  named_barrier(1, Tile<columns>::kMultipliers);  // all warps have read the ring
#pragma unroll
  for (int i = 0; i < columns / 2; i += 2) {
    const int u = i / 2 % 2;
    const float scale = Out::kAdds ? 1.0f : scales[u];
    *reinterpret_cast<float2*>(&s.sums[own_row() + 8 * u][first_column() + i / 4 * 8]) =
        make_float2(sums[i] * scale, sums[i + 1] * scale);
  }
  __syncwarp();
  for_each_piece<columns>(tile, [&](int u, int i, int piece, bool exists, int64_t at) {
    const float4* from = reinterpret_cast<const float4*>(&s.sums[own_row() + 8 * u][piece * 8]);
    const float4 low = from[0], high = from[1];
    float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if constexpr (Out::kAdds) {
      squares[u] += to.add(exists, at, old[i], values, s.norm[piece]);
    } else if (exists) {
      store16(to.out + at, pack8<T>(values));
    }
  });
  if constexpr (Out::kAdds) to.add_squares_of_lanes(tile, squares);
}

template <typename T, typename Out, int columns>
__global__ __launch_bounds__(Tile<columns>::kThreads) void linear_wide_kernel(
    const Out to, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap weight_map,
    const __grid_constant__ Work work) {
  if constexpr (kHopperCode) {
    extern __shared__ __align__(kTileAlignment) uint8_t shared_bytes[];
    auto& s = *reinterpret_cast<Shared<columns>*>(shared_bytes);
    uint4 old[kPieces<columns>] = {};  // of out
    multiply_tiles<T>(
        s.ring, x_map, weight_map, work, Part(work),
        [&](const Walk& tile, const float (&sums)[columns / 2]) { store<T>(to, s, tile, sums, old); },
        [&](const Walk& tile) {
          if constexpr (Out::kAdds) {
            to.template begin<Tile<columns>>(s.norm, tile);
            for_each_piece<columns>(tile, [&](int, int i, int, bool exists, int64_t at) {
              if (exists) old[i] = load16(to.out + at);
            });
          } else {
            read_scales<Tile<columns>>(to.scale, tile, [&](int token, float value) { s.scales[token] = value; });
          }
        });
  }
}

// In tiles of 64 features if all of them find an SM at once.
template <typename T, typename Out>
cudaError_t start(const Out& to, const void* x, const void* weight, int num_rows, int out_features, int in_features,
                  cudaStream_t stream) {
  const int pairs = device_attribute(cudaDevAttrMultiProcessorCount, 2) / 2;
  const int64_t tiles = static_cast<int64_t>(ceil_div(num_rows, 2 * kTokens)) * ceil_div(out_features, 64);
  return dispatch_int<64, 96>(tiles <= pairs ? 64 : 96, [&](auto columns) {
    using F = Tile<columns()>;
    const Work work = plan_work<F>(num_rows, out_features, in_features, false);
    return launch_tiles<F, false>(linear_wide_kernel<T, Out, columns()>, sizeof(Shared<columns()>), x, weight,
                                  out_features, in_features, work, stream, to);
  });
}

}  // namespace

template <typename T>
cudaError_t add_linear_whole(const Residual<T>& residual, const void* x, const void* weight, int num_rows,
                             int out_features, int in_features, cudaStream_t stream) {
  return start<T>(residual, x, weight, num_rows, out_features, in_features, stream);
}
template cudaError_t add_linear_whole(const Residual<__nv_bfloat16>&, const void*, const void*, int, int, int,
                                      cudaStream_t);
template cudaError_t add_linear_whole(const Residual<__half>&, const void*, const void*, int, int, int, cudaStream_t);

}  // namespace wide

cudaError_t linear_wide(void* out, const void* x, const void* weight, const int64_t* sums, int num_rows,
                        int out_features, int in_features, float eps, Dtype dtype, cudaStream_t stream) {
  using namespace wide;
  if (!is_supported(x, weight, num_rows, out_features, in_features, out)) return cudaErrorInvalidValue;
  return dispatch_hopper(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Plain<T> to{static_cast<T*>(out), RowScale(sums, in_features, eps)};
    return start<T>(to, x, weight, num_rows, out_features, in_features, stream);
  });
}

}  // namespace tinyvllm
