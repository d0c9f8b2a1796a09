// Rotary position embedding (RoFormer, Su et al. 2021) of the pairs of elements i and i + head_dim / 2 of a head.
#pragma once

#include "common.cuh"

namespace tinyvllm {

// Rotates two neighbouring pairs in fp32: (a, b) -> (a cos - b sin, b cos + a sin), rounded to T. `first` holds elements
// i and i + 1 of a head, `second` those head_dim / 2 further; cosines and sines are of positions' angles i and i + 1.
template <typename T>
__device__ __forceinline__ void rotate2(uint32_t& first, uint32_t& second, float2 cosines, float2 sines) {
  const float2 a = unpack2<T>(first);
  const float2 b = unpack2<T>(second);
  first = pack2<T>(fmaf(a.x, cosines.x, -(b.x * sines.x)), fmaf(a.y, cosines.y, -(b.y * sines.y)));
  second = pack2<T>(fmaf(b.x, cosines.x, a.x * sines.x), fmaf(b.y, cosines.y, a.y * sines.y));
}

}  // namespace tinyvllm
