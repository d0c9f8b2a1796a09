// How the CTAs of attention_decode take the parts that decode_parts has made of a batch's contexts (the first by number,
// what uneven contexts have beyond from a queue), and how the results of one context's parts are merged.
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

// Adds 1 and returns what was there. What this thread knows to be written before is seen by whom a later one is returned.
__device__ __forceinline__ int32_t arrive(int32_t* counter) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Counts this CTA's arrival; true in all threads of the last of `arrivals` CTAs, which then sees what the others wrote.
__device__ inline bool is_last_to_arrive(int32_t* counter, int arrivals) {
  bool last = false;
  __syncthreads();  // all stores of this CTA come before the arrival
  if (threadIdx.x == 0) {
    last = arrive(counter) == arrivals - 1;
    if (last) *counter = 0;  // as the next launch expects it
  }
  return __syncthreads_or(last);
}

// Merges the parts of one context in their order, a warp per query head. Part i is at values + i * values_stride.
template <typename T, int head_dim>
__device__ void merge_parts(T* out, const float* values, int64_t values_stride, const float2* stats,
                            int64_t stats_stride, int num_parts, int num_heads) {
  constexpr int chunk = 16;  // parts whose values and stats are on their way at a time
  constexpr int pairs = head_dim / 64;
  const int lane = threadIdx.x % kWarpSize;
  for (int head = threadIdx.x / kWarpSize; head < num_heads; head += blockDim.x / kWarpSize) {
    float max = -INFINITY;
    float sum = 0.0f;
    float2 total[pairs] = {};
    for (int begin = 0; begin < num_parts; begin += chunk) {
      float2 stat[chunk];
      float2 value[chunk][pairs];
#pragma unroll
      for (int i = 0; i < chunk; ++i) {
        const int part = begin + i;
        stat[i] = part < num_parts ? __ldcg(stats + part * stats_stride + head) : make_float2(-INFINITY, 0.0f);
#pragma unroll
        for (int d = 0; d < pairs; ++d) {
          const float* source = values + part * values_stride + head * head_dim + d * 64 + 2 * lane;
          value[i][d] =
              part < num_parts ? __ldcg(reinterpret_cast<const float2*>(source)) : make_float2(0.0f, 0.0f);
        }
      }
      float new_max = max;
#pragma unroll
      for (int i = 0; i < chunk; ++i) new_max = fmaxf(new_max, stat[i].x);
      const float correction = fast_exp2(max - new_max);
      max = new_max;
      sum *= correction;
#pragma unroll
      for (int d = 0; d < pairs; ++d) total[d] = make_float2(total[d].x * correction, total[d].y * correction);
#pragma unroll
      for (int i = 0; i < chunk; ++i) {
        const float weight = fast_exp2(stat[i].x - max);
        sum += weight * stat[i].y;
#pragma unroll
        for (int d = 0; d < pairs; ++d) {
          total[d].x += weight * value[i][d].x;
          total[d].y += weight * value[i][d].y;
        }
      }
    }
#pragma unroll
    for (int d = 0; d < pairs; ++d) {
      *reinterpret_cast<uint32_t*>(out + head * head_dim + d * 64 + 2 * lane) =
          pack2<T>(total[d].x / sum, total[d].y / sum);
    }
  }
}

}  // namespace tinyvllm
