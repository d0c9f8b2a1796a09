// residual[m, n] += sum_k x[m, k] * weight[n, k], rounded once, and what a norm behind it needs (launch.h), for 129 to 256
// rows and few features; here K is long, else it is linear_wide.cu's.
// x [M, K], weight [N, K], residual and scaled [M, N] of one 16-bit dtype; contiguous.
// Mapping: as linear_wide.cuh has it: a cluster has 128 features of all rows, its CTAs split K. Up to 192 rows are the
//   columns of one CTA, more belong to two that share the weights. Of the columns, in turn, a CTA gets all sums.
// Traffic: 2 M N K flop, bound by what shared memory takes in and gives to the tensor cores; then by the exchange.
// Limits: bf16 or fp16; K and N multiples of 8; compute capability 9.0.
#include "linear_wide_norm.cuh"

#pragma nv_diag_suppress 177  // unused: elsewhere than on sm_90a the kernel is empty

namespace tinyvllm {
namespace wide {
namespace {

constexpr int kMaxRows = 2 * kUsualOwn;
constexpr int kMinChunks = 128;   // of K, to split it
constexpr int kMaxCluster = 8;    // the largest that every device takes
constexpr int kFeatures = 128;    // of a cluster
constexpr int kPieceColumns = 8;  // go from CTA to CTA at once: four sums of each thread
constexpr int kMultipliers = Form<false, 0>::kMultipliers;
constexpr int kPieceBytes = kMultipliers * 16;

template <typename Form>
struct Shared {
  Ring<Form> ring;
  uint4 norm[kFeatures / 8];  // weights
};

// Sends a thread's sums of each piece to the CTA that adds it up: into its ring, by pieces, then splits. Within a warp's
// part of a piece threads change places, so that those that take the sums meet no bank conflicts.
template <typename Form>
__device__ __forceinline__ void send_sums(Ring<Form>& ring, const Walk& tile, const float (&sums)[Form::kColumns / 2]) {
  const int splits = tile.work.splits;
  const uint32_t received = shared_address(&ring.received);
  const int place = threadIdx.x ^ (Form::kWeightsShared ? threadIdx.x % kWarpSize / 8 : threadIdx.x / kWarpSize);
  uint32_t to = shared_address(&ring) + tile.part.split * kPieceBytes + place * 16;
  int owner = tile.part.half;  // its rank
#pragma unroll
  for (int i = 0; i < Form::kColumns / 2; i += 4) {
    store16_async(address_in(to, owner), make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]),
                  address_in(received, owner));
    owner += Form::kSharers;
    if (owner >= splits * Form::kSharers) {
      owner = tile.part.half;
      to += splits * kPieceBytes;
    }
  }
}

// What one thread takes of a piece, from all splits: two tokens by 8 features.
template <bool own_tokens>
struct Taker {
  static constexpr int kCount = kMultipliers / 4;  // of a piece
  static constexpr int kToToken = own_tokens ? 8 : 1;

  int warp;         // of the threads whose sums it takes
  int own, column;  // the first ones, of the own rows and of the piece

  __device__ Taker() {
    const int taker = threadIdx.x % kCount;
    warp = own_tokens ? taker / 8 : taker % 16 / 2;
    own = own_tokens ? warp * kWarpRows + taker % 8 : taker % 16 * 8;
    column = own_tokens ? 0 : taker / 16 * 2;
  }
  __device__ __forceinline__ void add(float (&values)[2][8], const float4* sums) const {
    sums += warp * kWarpSize;
#pragma unroll
    for (int i = 0; i < (own_tokens ? 4 : 8); ++i) {
      if constexpr (own_tokens) {
        const int g = own % 8;
        const float4 four = sums[4 * g + (i ^ g / 2)];
        values[0][2 * i] += four.x;
        values[0][2 * i + 1] += four.y;
        values[1][2 * i] += four.z;
        values[1][2 * i + 1] += four.w;
      } else {
        const int q = column / 2;
        const float2 two = reinterpret_cast<const float2*>(sums + ((4 * i + q) ^ warp))[own / 8 % 2];
        values[0][i] += two.x;
        values[1][i] += two.y;
      }
    }
  }
};

// Adds up the sums of the CTAs that split K: a CTA does it for its pieces, each of which comes with the sums of all.
template <typename T, typename Form>
__device__ __forceinline__ void exchange_and_add(const Residual<T>& to, const Walk& tile, Shared<Form>& s,
                                                 const float (&sums)[Form::kColumns / 2]) {
  constexpr bool own_tokens = Form::kWeightsShared;
  constexpr int pieces = Form::kColumns / kPieceColumns;
  using Squares = float[Form::kOwn + 1];  // of the tokens that the CTA has, in 8 of their features
  constexpr int squares_bytes = (own_tokens ? pieces : Form::kOwn / 8) * sizeof(Squares);
  static_assert((pieces + kMaxCluster) * kPieceBytes + squares_bytes <= sizeof(s.ring.own) + sizeof(s.ring.shared));
  const int splits = tile.work.splits;
  const int split = tile.part.split;
  const int mine = (pieces - split + splits - 1) / splits;
  const int bytes = splits * mine * kPieceBytes;
  Squares* squares = reinterpret_cast<Squares*>(reinterpret_cast<uint8_t*>(&s.ring) + bytes);
  const uint32_t received = shared_address(&s.ring.received);
  copy_wait<0>();
  __syncwarp();       // the norm's weights are there before thread 0, of the warp that copied them, arrives below
  cluster_barrier();  // all CTAs have read their rings
  if (threadIdx.x == 0) arrive_expecting(received, bytes);
  send_sums(s.ring, tile, sums);
  const Taker<own_tokens> taker;
  const int first = __shfl_sync(kAllLanes, threadIdx.x / taker.kCount, 0);  // the same in all lanes for the compiler too
  for (int i = first; i < mine; i += kMultipliers / taker.kCount) {
    const int column = (split + i * splits) * kPieceColumns + taker.column;
    const int token = own_tokens ? taker.own : column;
    int feature = own_tokens ? column : taker.own;
    asm volatile("" : "+r"(feature));  // of a sum with parts of it the compiler makes stores of 4 bytes
    int64_t at[2];
    bool exists[2];
    uint4 old[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile.token + token + r * taker.kToToken;
      exists[r] = row < tile.work.num_rows && tile.feature + feature < tile.work.num_features;
      at[r] = static_cast<int64_t>(row) * tile.work.num_features + tile.feature + feature;
      if (exists[r]) old[r] = load16(to.out + at[r]);
    }
    wait_barrier(received, 0);
    float values[2][8] = {};
    const float4* parts = reinterpret_cast<const float4*>(&s.ring) + i * splits * kMultipliers;
#pragma unroll 1  // the code is fetched for this once
    for (int n = 0; n < splits; ++n, parts += kMultipliers) taker.add(values, parts);
    float* of_tokens = own_tokens ? &squares[i][taker.own] : &squares[taker.own / 8][i * kPieceColumns + taker.column];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      of_tokens[r * taker.kToToken] = to.add(exists[r], at[r], old[r], values[r], s.norm[feature / 8]);
    }
  }
  if (to.sums == nullptr) return;
  named_barrier(1, kMultipliers);
  const int number = threadIdx.x;  // of a token
  const int column = (split + number / kPieceColumns * splits) * kPieceColumns + number % kPieceColumns;
  const int row = tile.token + (own_tokens ? number : column);
  if (number < (own_tokens ? Form::kOwn : mine * kPieceColumns) && row < tile.work.num_rows) {
    float sum = 0.0f;
    for (int i = 0; i < (own_tokens ? mine : Form::kOwn / 8); ++i) sum += squares[i][number];
    add_squares(to.sums + row, sum);
  }
}

template <typename T, typename Form>
__global__ __launch_bounds__(Form::kThreads, 1) void add_linear_wide_kernel(
    const Residual<T> to, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap weight_map,
    const __grid_constant__ Work work) {
  if constexpr (kHopperCode) {
    extern __shared__ __align__(kTileAlignment) uint8_t shared_bytes[];
    auto& s = *reinterpret_cast<Shared<Form>*>(shared_bytes);
    multiply_tiles<T>(
        s.ring, x_map, weight_map, work, Part(work),
        [&](const Walk& tile, const float (&sums)[Form::kColumns / 2]) {
          exchange_and_add<T, Form>(to, tile, s, sums);
        },
        [&](const Walk& tile) { to.template begin<Form>(s.norm, tile); });
  }
}

// Launches with as many splits as there are SMs for, if all clusters can run at once; a cluster has two CTAs at least.
template <typename Form, typename T>
cudaError_t launch_form(const Residual<T>& to, const void* x, const void* weight, int num_rows, int out_features,
                        int in_features, cudaStream_t stream) {
  constexpr int shared_bytes = sizeof(Shared<Form>);
  const auto kernel = add_linear_wide_kernel<T, Form>;
  Work work = plan_work<Form>(num_rows, out_features, in_features, false);
  work.meets = true;
  for (work.splits = std::min(kMaxCluster / Form::kSharers, work.num_chunks); work.splits > 0; --work.splits) {
    int resident = 0;
    const int size = Form::kSharers * work.splits;
    if (size < 2) break;
    const cudaError_t error = max_clusters(&resident, kernel, Form::kThreads, size, shared_bytes);
    if (error != cudaSuccess) return error;
    if (resident < work.feature_tiles) continue;
    return launch_tiles<Form>(kernel, shared_bytes, x, weight, out_features, in_features, work, stream, to);
  }
  return cudaErrorNotSupported;
}

template <typename T>
cudaError_t add_linear_split(const Residual<T>& to, const void* x, const void* weight, int num_rows, int out_features,
                             int in_features, cudaStream_t stream) {
  if (num_rows > kMaxRows || in_features < kMinChunks * kTileColumns) {
    return cudaErrorNotSupported;
  }
  const auto launch = [&](auto form) {
    return launch_form<decltype(form)>(to, x, weight, num_rows, out_features, in_features, stream);
  };
  const cudaError_t error = num_rows <= 160   ? launch(Form<false, 160, 1>{})
                            : num_rows <= 192 ? launch(Form<false, 192, 1>{})
                                              : cudaErrorNotSupported;
  return error == cudaErrorNotSupported ? launch(Form<true, kFeatures>{}) : error;
}

}  // namespace
}  // namespace wide

cudaError_t add_linear_wide(void* residual, void* scaled, int64_t* sums, int64_t* other_sums, const void* x,
                            const void* weight, const void* norm, int num_rows, int out_features, int in_features,
                            Dtype dtype, cudaStream_t stream) {
  using namespace wide;
  const bool supported = is_supported(x, weight, num_rows, out_features, in_features) &&
                         can_add(residual, scaled, sums, norm, out_features);
  if (!supported) return cudaErrorInvalidValue;
  return dispatch_hopper(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Residual<T> to{static_cast<T*>(residual), static_cast<T*>(scaled), sums, other_sums,
                         static_cast<const T*>(norm)};
    const cudaError_t split = add_linear_split(to, x, weight, num_rows, out_features, in_features, stream);
    return split == cudaErrorNotSupported
               ? add_linear_whole(to, x, weight, num_rows, out_features, in_features, stream)
               : split;
  });
}

}  // namespace tinyvllm
