// How the CTAs of attention_decode take the parts that decode_parts has made of a batch's contexts (the first by number,
// what uneven contexts have beyond from a queue).
#pragma once

#include "attention.cuh"
#include "decode_shape.cuh"

namespace tinyvllm {

// Past L1, so that it may run before wait_for_previous_kernel().
__device__ __forceinline__ Part load_part(const Part* parts, int number) {
  const uint4* source = reinterpret_cast<const uint4*>(parts + number);
  uint4 halves[2] = {__ldcg(source), __ldcg(source + 1)};
  return *reinterpret_cast<const Part*>(halves);
}

// Takes the next of `total` items that no CTA has; the CTA goes on until it gets one that does not exist. The last of
// `total` + all CTAs to ask leaves the queue at zero, as the next launch expects it. A barrier: shared memory may be used
// anew afterwards.
__device__ inline int take_item(int32_t* queue, int total, int* shared_item) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const int taken = atomicAdd(queue, 1);
    if (taken == total + static_cast<int>(gridDim.x * gridDim.y * gridDim.z) - 1) *queue = 0;
    *shared_item = taken;
  }
  __syncthreads();
  return *shared_item;
}

}  // namespace tinyvllm
