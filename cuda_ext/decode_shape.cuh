// How decode attention is shared out: what a warp, a CTA and a part of a context are. decode_parts makes the parts that
// attention_decode works on, so both must choose alike.
#pragma once

#include <algorithm>

#include "common.cuh"

namespace tinyvllm {

constexpr int kTile = 16;       // tokens a warp takes at a time: the rows of an mma
constexpr int kStages = 3;      // tiles in each warp's ring
constexpr int kHeads = 8;       // query heads of a CTA: the columns of an mma
constexpr int kWholeTiles = 6;  // per warp: a merge costs about as much

template <int head_dim>
constexpr int kSmWarps = 1024 / head_dim;  // their rings fill an SM's shared memory

template <int head_dim>
constexpr int kUsualWarps = kSmWarps<head_dim> / 2;  // of a CTA, at most: room for the kernels before and after it

template <int head_dim>
constexpr int kMaxWarps = kSmWarps<head_dim> * 3 / 4;  // where each CTA shall have an SM for itself

template <int head_dim>
constexpr int kRingBytes = kStages * 2 * kTile * head_dim * 2;  // of a warp

// Tiles `first` to `end` of a sequence's context: part `index` of `count`. Parts are numbered through all sequences, up
// to `total`; up to the number of those that CTAs take without asking, there are empty ones (count 0).
struct alignas(16) Part {
  int32_t seq;
  int32_t row;
  int32_t length;  // of the whole context
  int32_t first;
  int32_t end;
  int32_t index;
  int32_t count;
  int32_t total;
};

struct PartRule {
  int even_parts;    // of each of nearly equal contexts, at most; 0: nothing is ever cut
  int max_parts;     // of a mean context, if contexts are uneven
  int whole_tokens;  // contexts up to this are never cut: merging would cost more
  int min_tokens;    // of a part, about
};

struct DecodeShape {
  int groups;           // of at most kHeads query heads of a KV head
  int num_warps;        // of a CTA
  int first_parts;      // that have CTAs of their own
  size_t shared_bytes;  // of a CTA
  PartRule rule;
};

template <int head_dim>
size_t decode_shared_bytes(int num_warps) {
  return num_warps * kRingBytes<head_dim> + 16;  // the last for take_item
}

// A CTA has as many warps as let one for each sequence, KV head and group be resident at once, if that is possible, but
// min_warps at least. If there are about as many as SMs they are so large that no two share one. There are never more CTAs
// than are resident at once, as they wait for each other's parts; where that cannot be, nothing is cut.
// CTAs start as the previous kernel's leave SMs, so the first SMs would get as many as they hold and the last ones none:
// they ask for so much shared memory that each SM holds no more than its share. (us of attention at 147 contexts of 968
// tokens on an H200: 97 -> 77, at 82 of 1,268: 66 -> 56)
template <int head_dim>
DecodeShape choose_decode_shape(int num_seqs, int num_heads, int num_kv_heads, int num_splits, int min_warps) {
  const int groups = ceil_div(num_heads / num_kv_heads, kHeads);
  const int64_t pairs = static_cast<int64_t>(num_seqs) * num_kv_heads * groups;
  const int num_sms = device_attribute(cudaDevAttrMultiProcessorCount, 1);
  const size_t max_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, 48 * 1024);
  const bool alone =
      num_sms / 2 < pairs && pairs <= num_sms && decode_shared_bytes<head_dim>(kMaxWarps<head_dim>) <= max_bytes;
  int num_warps = alone ? kMaxWarps<head_dim> : kUsualWarps<head_dim>;
  const auto is_too_large = [&] {
    if (decode_shared_bytes<head_dim>(num_warps) > max_bytes) return true;
    return num_warps > min_warps && pairs * num_warps > num_sms * kSmWarps<head_dim>;
  };
  while (num_warps > 1 && is_too_large()) num_warps /= 2;
  const size_t sm_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, 64 * 1024);
  const size_t cta_bytes = decode_shared_bytes<head_dim>(num_warps) + 1024;  // the last for the system
  const int sm_ctas = std::min(kSmWarps<head_dim> / num_warps, static_cast<int>(sm_bytes / cta_bytes));
  const int most_parts = num_sms * sm_ctas / (num_kv_heads * groups);
  const int even_parts = most_parts > 0 ? num_splits / 2 : 0;
  const int first_parts = std::min(num_seqs * std::max(even_parts, 1), std::max(most_parts, 1));
  size_t shared_bytes = decode_shared_bytes<head_dim>(num_warps);
  const int64_t ctas = static_cast<int64_t>(first_parts) * num_kv_heads * groups;
  const size_t share = ceil_div<int64_t>(ctas, num_sms);  // of an SM
  if (share > 1) shared_bytes = std::max(shared_bytes, sm_bytes / (share + 1) / 16 * 16 - 1008);
  return {groups, num_warps, first_parts, std::min(shared_bytes, max_bytes),
          {even_parts, num_splits - 1, kWholeTiles * num_warps * kTile, 2 * num_warps * kTile}};
}

}  // namespace tinyvllm
