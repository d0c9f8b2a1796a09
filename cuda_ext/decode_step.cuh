// What the parts of decode_step share: its stages, how rows of weights are cut into tiles and shared among CTAs, the
// memory through which stages exchange their results, and bounded waiting.
#pragma once

#include "attention.cuh"
#include "bulk_copy.cuh"
#include "relaxed.cuh"
#include "sample_row.cuh"

namespace tinyvllm {

constexpr int kMaxStepRows = 8;
constexpr int kSummaryWords = kSegments * sizeof(Summary) / 4;  // of a row of logits
constexpr int kMaxStepLayers = 64;
constexpr int kStepWarps = 8;  // that multiply; one more streams the weights
constexpr int kStepThreads = kStepWarps * kWarpSize;
constexpr int kTileRows = 8;
constexpr int kHalfRows = 4;                          // a tile is two runs of consecutive rows
constexpr int kStrip = 2048;                          // elements of a row in a tile, at most
constexpr int kRowBytes = kStrip * 2;                 // from row to row of a tile
constexpr int kTileBytes = kTileRows * kRowBytes;
constexpr int kMaxRingTiles = 6;
constexpr int kChunk = 64;                            // elements of K a warp multiplies at once
constexpr int kMaxNormStrips = 2;                     // of hidden_size
constexpr int kSteps = kStrip / kChunk / kStepWarps;  // chunks of a strip that a warp takes
constexpr int kRoundTiles = 8;                        // tiles whose results are finished together
constexpr int kSplitTokens = 128;                     // a shorter context is not split
constexpr int kMaxContextSplits = 16;
constexpr int kCopiesInFlight = 3;                    // of half tiles: more would slow everything else down
constexpr int kMaxBlockSize = 4096;                   // of the KV cache
constexpr int kToldSteps = 4;                         // whose tokens the host's memory holds
constexpr int kHeaderWords = 64 + kMaxStepRows * kSummaryWords;
constexpr uint32_t kHole = 0xffffffffu;               // no conversion to 16 bits and no sum gives it: two NaNs, or one
constexpr int64_t kPatience = 4'000'000'000;          // cycles from the kernel's start until waits give up: 2 s

enum Stage : int { kQkv, kAttention, kO, kGateUp, kDown, kStagesPerLayer, kLogits };

// Strips of x that are held in registers at once; kNormStrips, 1 or 2, are all strips of hidden_size.
template <int kGroups, int kNormStrips>
__host__ __device__ constexpr int held_strips(int stage) {
  return stage == kDown ? 4 / kGroups : kNormStrips;
}

template <typename T>
struct LayerPointers {
  const T* attention_norm;
  const T* qkv;
  const T* o;
  const T* mlp_norm;
  const T* gate_up;
  const T* down;
};

// Where results lie within a set, in 32-bit words: [layer][rows][features] of 16 bits; the parts of split contexts as
// records [split][rows][Q]. A word that has not been written is a hole.
struct Exchange {
  int64_t qkv, parts, attention, middle, activation, hidden;
  int64_t layer_words;
};

// D elements of 16 bits and the logarithm of the sum of their weights, so that no two heads' logarithms share a line.
template <int head_dim>
constexpr int kRecordWords = head_dim / 2 + 4;

// Of the workspace. Summaries of the logits' segments follow at word 64, then two sets in turn, one used by a step, the
// other made into holes for the next.
struct StepHeader {
  int32_t steps;       // that have ended
  int32_t arrivals;    // of CTAs at the end
  int32_t written[2];  // words of each set that are no holes
  int32_t error[4];    // {1 + stage's number, CTA, warp, 0} of the wait that gave up first
  int32_t* told;       // null, or [kToldSteps][kMaxStepRows] in the host's memory: tokens of steps in turn
  unsigned long long best[kMaxStepRows];  // rank of the largest logit so far
};

// Division of numbers from 0 to 2^31 / divisor by a divisor that the host knows, without the code of a division.
struct Divisor {
  int divisor = 1;
  uint32_t inverse = 1u << 31;

  Divisor() = default;
  explicit Divisor(int d) : divisor(d), inverse(static_cast<uint32_t>(((int64_t{1} << 31) + d - 1) / d)) {}

  __device__ __forceinline__ int quotient(int x) const {
    return static_cast<int>(__umulhi(2 * static_cast<uint32_t>(x), inverse));
  }
  __device__ __forceinline__ int rest(int x) const { return x - quotient(x) * divisor; }
};

// ---- Weights: rows in tiles of 2 x 4, columns in strips, the tiles shared among the CTAs ----

struct LinearShape {
  int out_features, in_features;
  int num_strips;
  int strip;                     // elements of each but the last
  int tiles_per_cta, odd_tiles;  // of each CTA; that as many have besides
};

template <typename T>
struct StepArguments {
  float* logits;
  T* kv_cache;
  int32_t* sampled;
  int32_t* last_tokens;
  int32_t* next_positions;
  int32_t* context_lens;
  uint32_t* workspace;
  int64_t* times;
  const T* embed;
  const T* final_norm;
  const T* lm_head;
  const float* rope_table;
  const int32_t* rows;
  const int32_t* block_table;
  const float* temperature;
  const int64_t* seeds;
  int64_t kv_layer_elements;
  int64_t set_words;
  Exchange exchange;
  int num_rows, num_layers, hidden_size, intermediate_size, vocab_size, num_heads, num_kv_heads, block_size;
  int group_heads;  // query heads of a KV head
  Divisor ctas, by_rows, by_kv_heads, by_head_parts, by_block_size;
  int table_stride, num_stages, ring_tiles;
  int max_splits;  // of a context
  bool has_ends;
  float eps, scale;
  float inverse_hidden_size;
  LinearShape shapes[kLogits + 1];  // by stage
  LayerPointers<T> layers[kMaxStepLayers];
};

// The part of shared memory beside the ring, partial sums and attention.
struct StepShared {
  uint64_t full[kMaxRingTiles][2];  // of each half of a tile
  uint64_t empty[kMaxRingTiles];
  float squares[2][kStepWarps][kMaxStepRows];
  int64_t cache_offset[kMaxStepRows];  // of K of the new token for KV head 0, in elements; -1: nowhere
  int32_t token[kMaxStepRows], length[kMaxStepRows], row[kMaxStepRows];
  int32_t tiles_per_split[kMaxStepRows], num_splits[kMaxStepRows];
  int32_t steps, most_splits;
  int32_t written;  // words of the other set
  int32_t* told;  // where this step tells its tokens to the host, or null
  float scale[kMaxStepRows];  // of the logits, as `Row` has it
  int32_t draws;              // whether any of them is not 0
  int32_t arrival;
  int64_t deadline;
};

// ---- Waiting: no wait is endless ----

// Asked whenever a wait has failed. Some time after the kernel's start the CTA gives up: all its waits then end at once,
// and the kernel comes to its end with useless results and an error in the header.
struct Patience {
  StepHeader* header;
  volatile int64_t* deadline;  // in cycles; 0 once the CTA has given up
  int stage;                   // its number in the step

  __device__ __forceinline__ bool is_over() const {
    const int64_t end = *deadline;
    if (cycles() < end) return false;
    if (end != 0) {
      *deadline = 0;
      if (atomicCAS(header->error, 0, stage + 1) == 0) {
        store4_relaxed(header->error + 1, blockIdx.x);
        store4_relaxed(header->error + 2, threadIdx.x / kWarpSize);
      }
    }
    return true;
  }
};

__device__ __forceinline__ void wait_for(uint64_t* barrier, uint32_t parity, const Patience& patience) {
#pragma unroll 1
  while (!has_ended(shared_address(barrier), parity) && !patience.is_over()) {
  }
}

__device__ __forceinline__ bool has_hole(uint4 v) {
  return v.x == kHole || v.y == kHole || v.z == kHole || v.w == kHole;
}

__device__ __forceinline__ uint32_t wait_for_word(const void* address, uint32_t word, const Patience& patience) {
#pragma unroll 1
  while (word == kHole && !patience.is_over()) word = load4_relaxed(address);
  return word;
}

// ---- Which rows and tiles ----

// The first row of a half of a tile: qkv pairs elements i and i + D/2 of a head, which RoPE turns together; gate_up
// pairs gate i and up i.
template <int head_dim>
__device__ __forceinline__ int first_row(int stage, int tile, int half, int intermediate_size) {
  constexpr int head_tiles = head_dim / kTileRows;
  if (stage == kQkv) return tile / head_tiles * head_dim + tile % head_tiles * kHalfRows + half * (head_dim / 2);
  if (stage == kGateUp) return tile * kHalfRows + half * intermediate_size;
  return tile * kTileRows + half * kHalfRows;
}

// The tiles of this CTA. Who gets one of the last, odd ones changes from layer to layer.
struct Share {
  int first;
  int count;
};

template <typename T>
__device__ __forceinline__ Share share_of(const StepArguments<T>& a, const LinearShape& l, int layer) {
  const int rank = a.ctas.rest(blockIdx.x + layer * l.odd_tiles);
  return {rank * l.tiles_per_cta + min(rank, l.odd_tiles), l.tiles_per_cta + (rank < l.odd_tiles ? 1 : 0)};
}

}  // namespace tinyvllm
