// How the results of warps and of parts of a context are joined: by rows of shared memory, and between CTAs by slots of
// global memory that tell by themselves when they are filled: no fence, no counter, one latency.
#pragma once

#include "decode_tiles.cuh"
#include "relaxed.cuh"

namespace tinyvllm {

// What a part leaves in the workspace is never zero, so that a zero says it is not there yet; -0 is as good in a sum.
__device__ __forceinline__ uint32_t nonzero(float value) { return __float_as_uint(value == 0.0f ? -0.0f : value); }
__device__ __forceinline__ bool is_there(uint32_t word) { return word != 0; }

// Results of parts of a context, by rows, for 8 query heads: max of the scores, sum of their powers, and the sum of V
// weighted by these.
template <int head_dim>
struct Rows {
  static constexpr int pitch = head_dim + 4;  // no bank conflicts when a warp stores its mma results
  float2* stats;                              // {max, sum} [rows, kHeads]
  float* values;                              // [rows, kHeads, pitch]

  __device__ Rows(void* shared, int max_rows)
      : stats(static_cast<float2*>(shared)), values(reinterpret_cast<float*>(stats + max_rows * kHeads)) {}
};

// Puts the warp's result into its row of shared memory.
template <int head_dim>
__device__ __forceinline__ void put_row(const Rows<head_dim>& rows, const Softmax<head_dim>& softmax) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = threadIdx.x / kWarpSize * kHeads + lane % 4 * 2 + i;
    const float sum = reduce_column(softmax.sum[i], [](float x, float y) { return x + y; });
    if (lane / 4 == 0) rows.stats[row] = make_float2(softmax.max[i], sum);
    float* values = rows.values + row * rows.pitch + lane / 4;
#pragma unroll
    for (int d = 0; d < head_dim / 16; ++d) {
      values[d * 16] = softmax.values[d][i];
      values[d * 16 + 8] = softmax.values[d][i + 2];
    }
  }
}

// Of a query head in a slot, where a part of a context leaves its result: the values [heads, D], then {max, sum} [heads],
// then as many words of padding.
template <int head_dim>
constexpr int kSlotWords = head_dim + 4;

// Joins rows in their order; stores the result in `out` if that is not null, else in `slot`, not yet divided by the sum.
template <typename T, int head_dim>
__device__ __forceinline__ void join_rows(const Rows<head_dim>& rows, int num_rows, T* out, float* slot, int num_heads) {
  constexpr int quads = head_dim / 4;
  constexpr int batch = 4;  // rows whose loads are on their way at a time
  for (int i = threadIdx.x; i < num_heads * quads; i += blockDim.x) {
    const int head = i / quads;
    const int dim = i % quads * 4;
    const float2* stats = rows.stats + head;
    const float* values = rows.values + head * rows.pitch + dim;
    float max = -INFINITY;
#pragma unroll 1
    for (int begin = 0; begin < num_rows; begin += batch) {
#pragma unroll
      for (int j = 0; j < batch; ++j) max = fmaxf(max, stats[min(begin + j, num_rows - 1) * kHeads].x);
    }
    float sum = 0.0f;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int begin = 0; begin < num_rows; begin += batch) {
#pragma unroll
      for (int j = 0; j < batch; ++j) {
        const int row = min(begin + j, num_rows - 1) * kHeads;
        const float2 stat = stats[row];
        const float4 value = *reinterpret_cast<const float4*>(values + row * rows.pitch);
        const float weight = begin + j < num_rows ? fast_exp2(stat.x - max) : 0.0f;
        sum += weight * stat.y;
        total.x += weight * value.x;
        total.y += weight * value.y;
        total.z += weight * value.z;
        total.w += weight * value.w;
      }
    }
    if (out != nullptr) {
      const float factor = __fdividef(1.0f, sum);
      *reinterpret_cast<uint2*>(out + i * 4) =
          make_uint2(pack2<T>(total.x * factor, total.y * factor), pack2<T>(total.z * factor, total.w * factor));
    } else {
      store16_relaxed(slot + i * 4, make_uint4(nonzero(total.x), nonzero(total.y), nonzero(total.z), nonzero(total.w)));
      if (dim == 0) store8_relaxed(slot + num_heads * head_dim + head * 2, make_uint2(nonzero(max), nonzero(sum)));
    }
  }
}

// Waits for the parts of a context and merges them into rows of shared memory, each every so many-th part, in a fixed
// order; of the slots' num_heads heads those from first_head on, as many as `heads`. Returns how many rows.
template <int head_dim>
__device__ __forceinline__ int gather_rows(const Rows<head_dim>& rows, const float* slots, int num_parts, int num_heads,
                                           int first_head, int heads) {
  constexpr int quads = head_dim / 4;
  constexpr int batch = 6;  // parts whose loads are on their way at a time
  const int units = blockDim.x / quads;
  const float per_head = __fdividef(1.0f, static_cast<float>(heads));
  const int num_rows = max(1, static_cast<int>((units + 0.5f) * per_head));
  const int stride = num_heads * kSlotWords<head_dim>;
  for (int unit = threadIdx.x / quads; unit < num_rows * heads; unit += units) {
    const int row = static_cast<int>((unit + 0.5f) * per_head);
    const int head = unit - row * heads;
    const int dim = threadIdx.x % quads * 4;
    const float* value_source = slots + row * stride + (first_head + head) * head_dim + dim;
    const float* stat_source = slots + row * stride + num_heads * head_dim + (first_head + head) * 2;
    float max = -INFINITY;
    float sum = 0.0f;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int begin = row; begin < num_parts; begin += batch * num_rows) {
      uint2 stat[batch];
      uint4 value[batch];
      bool there;
      do {
        there = true;
        const float* value_at = value_source;
        const float* stat_at = stat_source;
#pragma unroll
        for (int j = 0; j < batch; ++j) {
          stat[j] = make_uint2(__float_as_uint(-INFINITY), nonzero(0.0f));
          value[j] = make_uint4(nonzero(0.0f), nonzero(0.0f), nonzero(0.0f), nonzero(0.0f));
          if (begin + j * num_rows < num_parts) {
            stat[j] = load8_relaxed(stat_at);
            value[j] = load16_relaxed(value_at);
          }
          value_at += num_rows * stride;
          stat_at += num_rows * stride;
        }
#pragma unroll
        for (int j = 0; j < batch; ++j) {
          there &= is_there(stat[j].x) && is_there(stat[j].y) && is_there(value[j].x) && is_there(value[j].y) &&
                   is_there(value[j].z) && is_there(value[j].w);
        }
      } while (!there);
      value_source += batch * num_rows * stride;
      stat_source += batch * num_rows * stride;
      float new_max = max;
#pragma unroll
      for (int j = 0; j < batch; ++j) new_max = fmaxf(new_max, __uint_as_float(stat[j].x));
      const float correction = fast_exp2(max - new_max);
      max = new_max;
      sum *= correction;
      total = make_float4(total.x * correction, total.y * correction, total.z * correction, total.w * correction);
#pragma unroll
      for (int j = 0; j < batch; ++j) {
        const float weight = fast_exp2(__uint_as_float(stat[j].x) - max);
        sum += weight * __uint_as_float(stat[j].y);
        total.x += weight * __uint_as_float(value[j].x);
        total.y += weight * __uint_as_float(value[j].y);
        total.z += weight * __uint_as_float(value[j].z);
        total.w += weight * __uint_as_float(value[j].w);
      }
    }
    *reinterpret_cast<float4*>(rows.values + (row * kHeads + head) * rows.pitch + dim) = total;
    if (dim == 0) rows.stats[row * kHeads + head] = make_float2(max, sum);
  }
  return num_rows;
}

constexpr int kDividedParts = 4;  // to have more of them for each head divides the merge: else it delays the next kernel

// Joins the warps' results of a part: in `out` if it is the whole context, else in its slot. The CTA of the last part then
// waits for the slots of all, merges them, and leaves zeros; where there are many parts, all with CTAs of their own
// (`alone`), those of the last parts do that for a head each. That ends, as all CTAs are resident at once (see
// choose_decode_shape) and take the items of the queue in order: nobody waits for a part that has not been taken.
template <typename T, int head_dim>
__device__ __forceinline__ void finish_part(const Softmax<head_dim>& softmax, void* shared, const Part& part, T* out,
                                            float* slots, int num_heads, bool alone) {
  const Rows<head_dim> rows(shared, blockDim.x / (head_dim / 4));
  const int slot_words = num_heads * kSlotWords<head_dim>;
  const bool divided = alone && part.count > kDividedParts * num_heads;
  const int first_head = divided ? part.count - 1 - part.index : 0;
  const int heads = divided ? 1 : num_heads;
  const bool merges = part.count > 1 && (divided ? first_head < num_heads : part.index == part.count - 1);
  T* to = part.count == 1 ? out : nullptr;
  int num_rows = blockDim.x / kWarpSize;
  int num_joined = num_heads;
  __syncthreads();  // the rings are not read any more
  put_row(rows, softmax);
  while (true) {  // the code is fetched for this once
    __syncthreads();
    join_rows<T, head_dim>(rows, num_rows, to, slots + part.index * slot_words, num_joined);
    if (to != nullptr || !merges) break;
    __syncthreads();
    num_rows = gather_rows<head_dim>(rows, slots, part.count, num_heads, first_head, heads);
    num_joined = heads;
    to = out + first_head * head_dim;
  }
  if (!merges) return;
  constexpr int quads = head_dim / 4;
  for (int i = threadIdx.x; i < part.count * heads * quads; i += blockDim.x) {
    float* slot = slots + i / (heads * quads) * slot_words;
    const int quad = i % (heads * quads);
    store16(slot + first_head * head_dim + quad * 4, make_uint4(0, 0, 0, 0));
    if (quad < heads) *reinterpret_cast<uint2*>(slot + num_heads * head_dim + (first_head + quad) * 2) = make_uint2(0, 0);
  }
}

}  // namespace tinyvllm
