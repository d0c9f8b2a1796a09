// Cuts the contexts of a batch into parts of about equal length, the units of work of attention_decode: see Part.
// parts int32 [num_seqs * num_splits, 8]; rows, context_lens int32 [num_seqs].
// Grid: one warp; sequence s belongs to lane s % 32, and the parts of a lane come before those of the next.
// Traffic: 8 bytes a sequence, 32 a part; bound by latency.
// Limits: none; the parts of padding (row -1 or length 0) have length 0.
#include <climits>

#include "decode_shape.cuh"

namespace tinyvllm {
namespace {

constexpr float kEven = 1.25f;     // contexts are uneven if one is longer than this many times the mean,
constexpr float kWhole = 2.25f;    // or than this many if each may stay whole: about as much as its warps read meanwhile
constexpr int kTokensAlone = 128;  // of a part that it takes at least, for each context

// A context is cut into ceil(length / tokens) parts, one if it is no longer than `whole`.
struct Cut {
  int tokens;
  int whole;

  __device__ int count(int length) const { return length <= whole ? 1 : ceil_div(length, tokens); }
};

// If no context is much longer than the mean, parts have the mean / even_parts tokens and half a part's even_parts-th more,
// so that nearly equal contexts give even_parts each, or fewer where parts would be so short that merging them costs more
// than it saves; else the mean / max_parts: the parts beyond those that all CTAs take first fill the gaps that these
// leave. So there are never more than num_contexts * (max_parts + 1).
__device__ Cut choose_cut(const PartRule& rule, unsigned tokens, unsigned num_contexts, int longest) {
  const float mean = static_cast<float>(tokens) / max(num_contexts, 1u);
  if (rule.even_parts == 0 || (rule.even_parts == 1 && longest <= kWhole * mean)) return {INT_MAX, INT_MAX};
  if (longest > kEven * mean) {
    const int part_tokens = max(rule.whole_tokens, static_cast<int>(ceilf(mean / rule.max_parts)));
    return {part_tokens, part_tokens};
  }
  const float shortest = fmaxf(rule.min_tokens + mean / 64, static_cast<float>(kTokensAlone) * num_contexts);
  const float parts = fminf(rule.even_parts, fmaxf(floorf(mean / shortest), 1.0f));
  const int part_tokens = static_cast<int>(ceilf(mean / parts * (1.0f + 0.5f / parts)));
  return {part_tokens, max(part_tokens, rule.whole_tokens)};
}

__global__ void decode_parts_kernel(Part* parts, const int32_t* rows, const int32_t* context_lens, int num_seqs,
                                    PartRule rule, int num_first) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int lane = threadIdx.x;
  unsigned tokens = 0;
  unsigned contexts = 0;
  int longest = 0;
  for (int seq = lane; seq < num_seqs; seq += kWarpSize) {
    const int length = context_lens[seq];
    tokens += length;
    contexts += length > 0 ? 1 : 0;
    longest = max(longest, length);
  }
  const Cut cut = choose_cut(rule, __reduce_add_sync(kAllLanes, tokens), __reduce_add_sync(kAllLanes, contexts),
                             __reduce_max_sync(kAllLanes, longest));

  int count = 0;
  for (int seq = lane; seq < num_seqs; seq += kWarpSize) count += cut.count(context_lens[seq]);
  int end = count;  // becomes the number of the first part after this lane's
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int below = __shfl_up_sync(kAllLanes, end, offset);
    if (lane >= offset) end += below;
  }
  const int total = __shfl_sync(kAllLanes, end, kWarpSize - 1);
  int number = end - count;
  for (int seq = lane; seq < num_seqs; seq += kWarpSize) {
    const int row = rows[seq];
    const int length = row < 0 ? 0 : context_lens[seq];
    const int tiles = ceil_div(length, kTile);
    const int seq_parts = cut.count(context_lens[seq]);
    const int share = tiles / seq_parts;
    const int remainder = tiles % seq_parts;
    for (int i = 0; i < seq_parts; ++i) {
      const int first = i * share + min(i, remainder);
      parts[number++] = {seq, row, length, first, first + share + (i < remainder ? 1 : 0), i, seq_parts, total};
    }
  }
  for (int i = total + lane; i < num_first; i += kWarpSize) parts[i] = {0, -1, 0, 0, 0, 0, 0, total};
}

}  // namespace

cudaError_t decode_parts(int32_t* parts, const int32_t* rows, const int32_t* context_lens, int num_seqs, int num_heads,
                         int num_kv_heads, int head_dim, int num_splits, int min_warps, cudaStream_t stream) {
  const bool supported = num_seqs >= 0 && num_kv_heads > 0 && num_heads >= num_kv_heads;
  if (!supported || num_splits <= 0 || min_warps <= 0) return cudaErrorInvalidValue;
  return dispatch_head_dim(head_dim, [&](auto dim) {
    if (num_seqs == 0) return cudaSuccess;
    const DecodeShape shape = choose_decode_shape<dim()>(num_seqs, num_heads, num_kv_heads, num_splits, min_warps);
    return launch(decode_parts_kernel, 1, kWarpSize, 0, stream, reinterpret_cast<Part*>(parts), rows, context_lens,
                  num_seqs, shape.rule, shape.first_parts);
  });
}

}  // namespace tinyvllm
