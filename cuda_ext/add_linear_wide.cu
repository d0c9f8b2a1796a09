// out[m, n] += sum_k x[m, k] * weight[n, k], rounded once, for 129 to 256 rows and few features; here if K is long, else
// in linear_wide.cu.
// x [M, K], weight [N, K], out [M, N] of one 16-bit dtype; contiguous.
// Mapping: as linear_wide.cuh has it: a cluster has 128 features of all rows, its CTAs split K. Up to 192 rows are the
//   columns of one CTA, more belong to two that share the weights. Of the columns, in turn, a CTA gets all sums.
// Traffic: 2 M N K flop, bound by what shared memory takes in and gives to the tensor cores; then by the exchange.
// Limits: bf16 or fp16; K and N multiples of 8; compute capability 9.0.
#include "linear_wide.cuh"

#pragma nv_diag_suppress 177  // unused: elsewhere than on sm_90a the kernel is empty

namespace tinyvllm {
namespace wide {
namespace {

constexpr int kMaxRows = 2 * kUsualOwn;
constexpr int kMinChunks = 128;   // of K, to split it
constexpr int kMaxCluster = 8;    // the largest that every device takes
constexpr int kFeatures = 128;    // of a cluster
constexpr int kPieceColumns = 8;  // go from CTA to CTA at once: four sums of each thread
constexpr int kPieceBytes = Form<false, 0>::kMultipliers * 16;

// What a thread has of out in a piece, at 2 u + v: row g + 8 u of its warp's 16 and column 2 q + v.
template <typename T, bool weights_shared>
struct Target {
  T* out;
  int num_rows, num_features;
  int own, column;  // the first ones

  __device__ Target(T* to, const Walk& tile) : out(to) {
    num_rows = tile.work.num_rows;
    num_features = tile.work.num_features;
    own = (weights_shared ? tile.token : tile.feature) + own_row();
    column = (weights_shared ? tile.feature : tile.token) + first_column();
    asm volatile("" : "+r"(own), "+r"(column));  // addresses are not worked out earlier: registers are few
  }
  // Calls function(i, element) for those that exist.
  template <typename Function>
  __device__ __forceinline__ void for_each(int piece, const Function& function) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int of_own = own + i / 2 * 8;
      const int of_column = column + piece * kPieceColumns + i % 2;
      const int row = weights_shared ? of_own : of_column;
      const int feature = weights_shared ? of_column : of_own;
      if (row >= num_rows || feature >= num_features) continue;
      function(i, out[static_cast<int64_t>(row) * num_features + feature]);
    }
  }
};

// Adds up the sums of the CTAs that split K. The pieces are theirs in turn: the owner gets the sums of all into its
// ring, by splits, each thread those of the threads with its number.
template <typename T, typename Form>
__device__ __forceinline__ void exchange_and_add(T* out, const Walk& tile, Ring<Form>& ring, const Work& work,
                                                 const Part& part, const float (&sums)[Form::kColumns / 2]) {
  constexpr int pieces = Form::kColumns / kPieceColumns;
  constexpr int batch = pieces > 16 ? 4 : 6;  // whose part of out is loaded ahead
  const int splits = work.splits;
  const int mine = (pieces - part.split + splits - 1) / splits;
  const uint32_t received = shared_address(&ring.received);
  uint32_t to = shared_address(&ring) + part.split * kPieceBytes + threadIdx.x * 16;
  cluster_barrier();  // all CTAs have read their rings
  if (threadIdx.x == 0) arrive_expecting(received, splits * mine * kPieceBytes);
  int owner = part.half;  // its rank
#pragma unroll
  for (int piece = 0; piece < pieces; ++piece) {
    const float* four = sums + 4 * piece;
    store16_async(address_in(to, owner), make_float4(four[0], four[1], four[2], four[3]), address_in(received, owner));
    owner += Form::kSharers;
    if (owner >= splits * Form::kSharers) {
      owner = part.half;
      to += splits * kPieceBytes;
    }
  }
  const float4* parts = reinterpret_cast<const float4*>(&ring) + threadIdx.x;
  for (int first = 0; first < mine; first += batch) {
    T old[batch][4];
    const Target<T, Form::kWeightsShared> source(out, tile);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (first + i >= mine) break;
      source.for_each(part.split + (first + i) * splits, [&](int at, const T& element) { old[i][at] = element; });
    }
    wait_barrier(received, 0);
    const Target<T, Form::kWeightsShared> target(out, tile);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (first + i >= mine) break;
      const float4 sum = sum_of_parts(parts, splits, Form::kMultipliers);
      const float four[4] = {sum.x, sum.y, sum.z, sum.w};
      target.for_each(part.split + (first + i) * splits,
                      [&](int at, T& element) { element = from_float<T>(to_float(old[i][at]) + four[at]); });
    }
  }
}

template <typename T, typename Form>
__global__ __launch_bounds__(Form::kThreads, 1) void add_linear_wide_kernel(
    T* out, const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap weight_map,
    const __grid_constant__ Work work) {
  if constexpr (kHopperCode) {
    extern __shared__ __align__(kTileAlignment) uint8_t shared_bytes[];
    auto& ring = *reinterpret_cast<Ring<Form>*>(shared_bytes);
    const Part part(work);
    multiply_tiles<T>(ring, x_map, weight_map, work, part,
                      [&](const Walk& tile, const float (&sums)[Form::kColumns / 2]) {
                        exchange_and_add<T, Form>(out, tile, ring, work, part, sums);
                      });
  }
}

// Launches with as many splits as there are SMs for, if all clusters can run at once; a cluster has two CTAs at least.
template <typename T, typename Form>
cudaError_t launch_form(T* out, const void* x, const void* weight, int num_rows, int out_features, int in_features,
                        cudaStream_t stream) {
  constexpr int shared_bytes = sizeof(Ring<Form>);
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
    return launch_tiles<Form>(kernel, shared_bytes, x, weight, out_features, in_features, work, stream, out);
  }
  return cudaErrorNotSupported;
}

}  // namespace
}  // namespace wide

cudaError_t add_linear_wide(void* out, const void* x, const void* weight, int num_rows, int out_features,
                            int in_features, Dtype dtype, cudaStream_t stream) {
  using namespace wide;
  if (!is_supported(x, weight, num_rows, out_features, in_features, out)) return cudaErrorInvalidValue;
  const auto whole = [&] {
    return add_linear_whole(out, x, weight, num_rows, out_features, in_features, dtype, stream);
  };
  if (num_rows > kMaxRows || in_features < kMinChunks * kTileColumns) return whole();
  const cudaError_t split = dispatch_hopper(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto form) {
      T* to = static_cast<T*>(out);
      return launch_form<T, decltype(form)>(to, x, weight, num_rows, out_features, in_features, stream);
    };
    const cudaError_t error = num_rows <= 160   ? launch(Form<false, 160, 1>{})
                              : num_rows <= 192 ? launch(Form<false, 192, 1>{})
                                                : cudaErrorNotSupported;
    return error == cudaErrorNotSupported ? launch(Form<true, kFeatures>{}) : error;
  });
  return split == cudaErrorNotSupported ? whole() : split;
}

}  // namespace tinyvllm
