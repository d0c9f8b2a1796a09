// out[m, n] = sum_k x[m, k] * weight[n, k] for 1 to 8 rows m: weights are streamed once, by tensor cores.
// x [M, K], weight [N, K] of one 16-bit dtype, out [M, N] of that dtype or fp32; contiguous.
// Grid: at most one CTA per SM, walking over units of 8 or 16 features; its 16 warps split K, 64 elements at a time,
//   each through its own ring of asynchronous copies; their partial sums are added in a fixed order.
// Traffic: 2 N K bytes of weights, bound by bandwidth; the ring is filled while the previous kernel still runs.
// Limits: bf16 or fp16; in_features a multiple of 8; a row's result does not depend on the number of rows.
#include "common.cuh"

namespace tinyvllm {
namespace {

constexpr int kMaxRows = 8;
constexpr int kWarps = 16;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kTileFeatures = 8;                          // an MMA takes one tile, or two
constexpr int kChunk = 64;                                // elements of K that a warp takes from each feature at once
constexpr int kChunkVectors = kChunk / 8;
constexpr int kStep = kWarps * kChunk;                    // elements of K that the CTA takes at once
constexpr int kStepsAhead = 4;                            // of x, when it is not held
constexpr int kTileBytes = kTileFeatures * kChunk * 2;    // one tile, one warp, one step
constexpr int kRingTiles = 12;                            // tiles in a warp's ring: 192 KB per CTA
constexpr int kSmallRingTiles = 4;                        // for devices with 100 KB of shared memory: 64 KB per CTA
constexpr int kEarlyTiles = 4;                            // in flight while the previous kernel runs and needs memory

// What a lane multiplies in one step: elements 8q to 8q + 7 of both 32-element halves of its warp's chunk, of row g,
// with g = lane / 4 and q = lane % 4. An MMA sums over k in any order if both sides agree on it, so a 16-byte piece
// serves as the two k-pairs of two MMAs.
struct Piece {
  uint4 half[2];
};

__device__ __forceinline__ int first_element(int step) {
  return step * kStep + threadIdx.x / kWarpSize * kChunk;
}

// `source` is the lane's piece of step 0; `count` elements follow it in its row, none if there is no such row.
template <typename T>
__device__ __forceinline__ Piece load_x(const T* source, int count, int step) {
  Piece piece;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int k = step * kStep + 32 * i;
    piece.half[i] = k < count ? load16(source + k) : make_uint4(0, 0, 0, 0);
  }
  return piece;
}

// sums[2 t + r] += weights of feature 8 t + g times row 2q + r of x. Without a second tile, half of each MMA is zero.
template <typename T, int kTiles>
__device__ __forceinline__ void multiply(float (&sums)[4], const Piece (&weights)[kTiles], const Piece& x) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 a = weights[0].half[i];
    const uint4 b = kTiles == 2 ? weights[kTiles - 1].half[i] : make_uint4(0, 0, 0, 0);
    mma_16x8x16<T>(sums, {a.x, b.x, a.y, b.y}, {x.half[i].x, x.half[i].y});
    mma_16x8x16<T>(sums, {a.z, b.z, a.w, b.w}, {x.half[i].z, x.half[i].w});
  }
}

// A warp's ring of kStages steps, each kTiles tiles of 8 features x 128 bytes. The 16-byte pieces of odd features are
// stored with their halves swapped: then neither copies nor reads meet bank conflicts.
template <typename T, int kTiles, int kStages>
class WeightStream {
 public:
  static constexpr int kUnitFeatures = kTiles * kTileFeatures;

  __device__ WeightStream(uint4* ring, const T* weight, int out_features, int in_features, int num_steps)
      : ring_(ring + threadIdx.x / kWarpSize * kUnitFeatures * kChunkVectors),
        out_features_(out_features),
        in_features_(in_features),
        num_steps_(num_steps),
        unit_(blockIdx.x * kUnitFeatures) {
    const int row = unit_ + threadIdx.x % kWarpSize / kChunkVectors;
    source_ = weight + static_cast<int64_t>(row) * in_features + first_element(0) + threadIdx.x % kChunkVectors * 8;
  }

  __device__ bool has_next() const { return unit_ < out_features_; }

  // Starts the copy of the next step, if there is one, into stage `stage`, and closes its group in any case. The lane
  // copies one piece of every fourth feature.
  __device__ void issue(int stage) {
    if (has_next()) {
      const int row = threadIdx.x % kWarpSize / kChunkVectors;
      const int piece = threadIdx.x % kChunkVectors;
      const bool in_row = first_element(step_) + piece * 8 < in_features_;
      uint4* target = stage_ring(stage) + row * kChunkVectors + (piece ^ (row % 2 * 4));
#pragma unroll
      for (int i = 0; i < kUnitFeatures / 4; ++i) {
        copy16_async(target + 4 * i * kChunkVectors, source_ + static_cast<int64_t>(4 * i) * in_features_,
                     in_row && unit_ + row + 4 * i < out_features_);
      }
    }
    copy_commit();
    source_ += kStep;
    if (++step_ == num_steps_) {
      step_ = 0;
      unit_ += gridDim.x * kUnitFeatures;
      source_ += static_cast<int64_t>(gridDim.x * kUnitFeatures) * in_features_ - num_steps_ * kStep;
    }
  }

  __device__ Piece read(int stage, int tile) const {
    const int feature = threadIdx.x % kWarpSize / 4;
    const uint4* pieces = stage_ring(stage) + (tile * kTileFeatures + feature) * kChunkVectors;
    const int first = threadIdx.x % 4 + feature % 2 * 4;
    return {pieces[first], pieces[first ^ 4]};
  }

 private:
  __device__ uint4* stage_ring(int stage) const {
    return ring_ + stage * kWarps * kUnitFeatures * kChunkVectors;
  }

  uint4* ring_;
  const T* source_;
  int out_features_;
  int in_features_;
  int num_steps_;
  int unit_;  // its first feature
  int step_ = 0;
};

// kHeldSteps: x is held in registers when it takes so many steps; 0: any number, x is read again for every unit, some
// steps ahead.
template <typename T, int kHeldSteps, int kTiles, int kStages>
__global__ __launch_bounds__(kThreads, kHeldSteps > 0 ? 2 : 1) void matvec_kernel(
    void* out, const T* x, const T* weight, int num_rows, int out_features, int in_features, bool float_out) {
  extern __shared__ uint4 ring[];
  constexpr int kUnitFeatures = kTiles * kTileFeatures;
  __shared__ float partial[2][kWarps][kMaxRows * kUnitFeatures];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int num_steps = kHeldSteps > 0 ? kHeldSteps : ceil_div(in_features, kStep);

  WeightStream<T, kTiles, kStages> stream(ring, weight, out_features, in_features, num_steps);
  allow_next_kernel();
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) {
    if (stream.has_next()) copy_wait<kEarlyTiles / kTiles - 1>();
    stream.issue(stage);
  }
  wait_for_previous_kernel();

  constexpr int kHeld = kHeldSteps > 0 ? kHeldSteps : kStepsAhead;
  Piece held[kHeld];
  const int x_row = lane / 4;
  const int x_first = first_element(0) + lane % 4 * 8;
  const int x_count = x_row < num_rows ? in_features - x_first : 0;
  const T* x_source = x + static_cast<int64_t>(x_row) * in_features + x_first;
#pragma unroll
  for (int step = 0; step < kHeld; ++step) held[step] = load_x(x_source, x_count, step);

  int stage = 0;
  int buffer = 0;
  for (int first = blockIdx.x * kUnitFeatures; first < out_features; first += gridDim.x * kUnitFeatures) {
    float sums[4] = {};
    const auto multiply_step = [&](const Piece& x_piece) {
      copy_wait<kStages - 1>();
      __syncwarp();  // this stage is complete in all lanes
      Piece weights[kTiles];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) weights[tile] = stream.read(stage, tile);
      __syncwarp();  // and read by all lanes
      stream.issue(stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
      multiply<T>(sums, weights, x_piece);
    };
    if constexpr (kHeldSteps > 0) {
#pragma unroll
      for (int step = 0; step < kHeldSteps; ++step) multiply_step(held[step]);
    } else {
      const bool is_last = first + gridDim.x * kUnitFeatures >= out_features;
#pragma unroll 1
      for (int block = 0; block < num_steps; block += kStepsAhead) {
#pragma unroll
        for (int i = 0; i < kStepsAhead; ++i) {
          if (block + i >= num_steps) break;
          const Piece current = held[i];
          const int next = block + i + kStepsAhead;
          if (next < num_steps || !is_last) held[i] = load_x(x_source, x_count, next < num_steps ? next : i);
          multiply_step(current);
        }
      }
    }

#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      partial[buffer][warp][(lane % 4 * 2 + i % 2) * kUnitFeatures + i / 2 * kTileFeatures + lane / 4] = sums[i];
    }
    __syncthreads();  // the other buffer is free too: its readers have arrived here
    if (threadIdx.x < num_rows * kUnitFeatures) {
      const int row = threadIdx.x / kUnitFeatures;
      const int feature = first + threadIdx.x % kUnitFeatures;
      if (feature < out_features) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) total += partial[buffer][i][threadIdx.x];
        const int64_t target = static_cast<int64_t>(row) * out_features + feature;
        if (float_out) {
          static_cast<float*>(out)[target] = total;
        } else {
          static_cast<T*>(out)[target] = from_float<T>(total);
        }
      }
    }
    buffer ^= 1;
  }
}

template <typename T, int kHeldSteps, int kTiles, int kStages>
cudaError_t launch_matvec(void* out, const T* x, const T* weight, int num_rows, int out_features, int in_features,
                          bool float_out, cudaStream_t stream) {
  const int num_units = ceil_div(out_features, kTiles * kTileFeatures);
  const int num_sms = device_attribute(cudaDevAttrMultiProcessorCount, 1);
  const int num_ctas = num_units < num_sms ? num_units : num_sms;
  const int64_t used_stages = static_cast<int64_t>(ceil_div(num_units, num_ctas)) * ceil_div(in_features, kStep);
  const int64_t stages = used_stages < kStages ? used_stages : kStages;
  return launch(matvec_kernel<T, kHeldSteps, kTiles, kStages>, num_ctas, kThreads,
                stages * kWarps * kTiles * kTileBytes, stream, out, x, weight, num_rows, out_features, in_features,
                float_out);
}

}  // namespace

cudaError_t matvec(void* out, const void* x, const void* weight, int num_rows, int out_features, int in_features,
                   Dtype dtype, Dtype out_dtype, cudaStream_t stream) {
  const bool supported = num_rows >= 1 && num_rows <= kMaxRows && out_features > 0 && in_features > 0 &&
                         in_features % 8 == 0 && (out_dtype == dtype || out_dtype == Dtype::kF32) && is_aligned16(x) &&
                         is_aligned16(weight);
  if (!supported) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int available = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
    const int ring_tiles = available >= 225 * 1024 ? kRingTiles : kSmallRingTiles;
    return dispatch_int<kRingTiles, kSmallRingTiles>(ring_tiles, [&](auto tiles) {
      const auto start = [&](auto launcher) {
        return launcher(out, static_cast<const T*>(x), static_cast<const T*>(weight), num_rows, out_features,
                        in_features, out_dtype == Dtype::kF32, stream);
      };
      switch (ceil_div(in_features, kStep)) {
        case 1:
          return start(launch_matvec<T, 1, 1, tiles()>);
        case 2:
          return start(launch_matvec<T, 2, 1, tiles()>);
        default:
          return start(launch_matvec<T, 0, 2, tiles() / 2>);
      }
    });
  });
}

}  // namespace tinyvllm
