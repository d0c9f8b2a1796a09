// Norms ahead of and behind the products of linear_wide.cuh; launch.h has the whole.
#pragma once

#include "linear_wide.cuh"
#include "norm_sums.cuh"

namespace tinyvllm::wide {

// Ahead of a tile's products: put(token, what they are to be multiplied by), into shared memory. Where tokens are the own
// rows a warp does it for its own; else a barrier of all that multiply must follow.
template <typename Form, typename Put>
__device__ __forceinline__ void read_scales(const RowScale& scale, const Walk& tile, const Put& put) {
  int token = threadIdx.x;
  if constexpr (Form::kWeightsShared) token = threadIdx.x / kWarpSize * kWarpRows + threadIdx.x % kWarpRows;
  if (Form::kWeightsShared || token < Form::kColumns) {
    put(token, tile.token + token < tile.work.num_rows ? scale.of(tile.token + token) : 0.0f);
  }
  __syncwarp();
}

// Of pieces of 8 elements.
template <typename T>
__device__ __forceinline__ uint4 multiply8(uint4 a, uint4 b) {
  return make_uint4(multiply2<T>(a.x, b.x), multiply2<T>(a.y, b.y), multiply2<T>(a.z, b.z), multiply2<T>(a.w, b.w));
}

// A residual that products are added to, and the norm behind it: scaled, sums and weight are null if there is none. Its
// kernels give a CTA one tile.
template <typename T>
struct Residual {
  static constexpr bool kAdds = true;
  T* out;
  T* scaled;
  int64_t* sums;
  int64_t* other_sums;
  const T* weight;

  // Ahead of the tile's products: sets other_sums to zero and starts to copy the norm's weights for its features into
  // shared memory. Behind the products the first warp's copy_wait<0>() must follow, and a barrier that the others wait at.
  template <typename Form>
  __device__ __forceinline__ void begin(uint4* weights, const Walk& tile) const {
    constexpr int features = Form::kWeightsShared ? Form::kColumns : Form::kOwn;
    const int first = threadIdx.x * 8;
    if (weight != nullptr && first < features) {
      copy16_async(weights + threadIdx.x, weight + tile.feature + first, tile.feature + first < tile.work.num_features);
      copy_commit();
    }
    if (other_sums == nullptr || blockIdx.x > 0) return;
    for (int row = threadIdx.x; row < tile.work.num_rows; row += Form::kMultipliers) other_sums[row] = 0;
  }
  // Adds 8 elements to the old ones, and if they exist stores what launch.h says. Returns the sum of their squares.
  __device__ __forceinline__ float add(bool exists, int64_t at, uint4 old, float (&values)[8], uint4 weights) const {
    float before[8];
    unpack8<T>(old, before);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] += before[i];
    const uint4 rounded = pack8<T>(values);
    if (exists) store16(out + at, rounded);
    if (exists && scaled != nullptr) store16(scaled + at, multiply8<T>(rounded, weights));
    unpack8<T>(rounded, values);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += values[i] * values[i];
    return exists ? squares : 0.0f;
  }
  // Adds the squares of what the lanes of a warp with own tokens have of two rows each.
  __device__ __forceinline__ void add_squares_of_lanes(const Walk& tile, const float (&squares)[2]) const {
    if (sums == nullptr) return;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const float sum = warp_sum<4>(squares[u]);
      const int row = tile.token + own_row() + 8 * u;
      if (threadIdx.x % 4 == 0 && row < tile.work.num_rows) add_squares(sums + row, sum);
    }
  }
};

// add_linear_wide without splitting K.
template <typename T>
cudaError_t add_linear_whole(const Residual<T>& residual, const void* x, const void* weight, int num_rows,
                             int out_features, int in_features, cudaStream_t stream);

}  // namespace tinyvllm::wide
