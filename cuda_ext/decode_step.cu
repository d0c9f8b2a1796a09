// One decode step of a Llama for 1 to 8 rows in one kernel: logits[i] = model(last_tokens[rows[i]] at next_positions[i]),
// K and V stored, and the row's next token, the largest logit or drawn at its temperature. Shapes as in launch.h; all
// weights bf16 or fp16, activations of that dtype, sums and logits fp32.
// Grid: one CTA per SM, all resident. One warp of a CTA streams its share of all weights through a ring in shared memory
//   and never waits for activations; eight warps do the layers' work. 5 stages a layer: qkv (norm, RoPE, KV store),
//   attention, o (residual), gate/up (norm, SiLU), down (residual); then logits (norm).
// Traffic: 2 bytes a weight, and K and V of the contexts; bound by bandwidth while the ring, and the tiles that warps take
//   out of it early, cover the stages' latency. The layers' code must fit in the instruction cache, of about 128 KB:
//   kernels differ by all that changes much code, and there are no divisions in the layers.
// Limits: sm_90; hidden_size up to 4096, it and intermediate_size multiples of 8; head_dim 64, 128; up to 64 layers;
//   blocks of up to 4096 tokens.
//
// Stages meet through words in global memory that begin as holes (a NaN pattern that no result has): a reader loads the
// words that it needs until none is a hole, so that there is no fence, no counter and no barrier of the grid. Every stage
// of a step has words of its own, and two steps in turn use two sets: while one is in use the other is made into holes.
#include "decode_step_stream.cuh"
#include "decode_step_worker.cuh"

namespace tinyvllm {
namespace {

constexpr int kCtaThreads = kStepThreads + 4 * kWarpSize;  // registers go by warpgroups; 3 warps are idle
constexpr int kExpectedCtas = 132;  // that share the contexts of a small batch

// Floats of a round's products, or of attention.
template <int head_dim>
__host__ __device__ constexpr int round_floats(int num_rows, int group_heads) {
  const int products = kRoundTiles * tile_partials(num_rows);
  const int heads = attention_floats<head_dim>(group_heads);
  return products > heads ? products : heads;
}

template <typename T, int head_dim, int kGroups, int kNormStrips>
__global__ __launch_bounds__(kCtaThreads, 1) void decode_step_kernel(const __grid_constant__ StepArguments<T> a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ uint4 shared[];
  unsigned char* ring = reinterpret_cast<unsigned char*>(shared);
  StepShared& s = *reinterpret_cast<StepShared*>(ring + a.ring_tiles * kTileBytes);
  float* partials = reinterpret_cast<float*>(&s + 1);
  const Patience patience{reinterpret_cast<StepHeader*>(a.workspace), &s.deadline, 0};
  if (threadIdx.x == kStepThreads) {
    for (int i = 0; i < a.ring_tiles; ++i) {
      init_barrier(shared_address(&s.full[i][0]), 1);
      init_barrier(shared_address(&s.full[i][1]), 1);
      init_barrier(shared_address(&s.empty[i]), kStepWarps);
    }
    s.deadline = cycles() + kPatience;
    fence_for_copies();
  }
  if (a.has_ends) {  // chunks that no copy fills must hold finite numbers
    for (int i = threadIdx.x; i < a.ring_tiles * kTileBytes / 16; i += kCtaThreads) shared[i] = make_uint4(0, 0, 0, 0);
    fence_for_copies();
  }
  __syncthreads();
  if (threadIdx.x < kStepThreads) {
    claim_registers<232>();
    Worker<T, head_dim, kGroups, kNormStrips> worker{
        a, s, ring, partials, round_floats<head_dim>(a.num_rows, a.num_heads / a.num_kv_heads), patience,
        Output(a.num_rows)};
    worker.run();
  } else {
    give_up_registers<40>();
    if (threadIdx.x < kStepThreads + kWarpSize) {
      WeightStream<T, head_dim, kGroups, kNormStrips> stream{a, s, ring, patience, evict_first_policy(),
                                                             static_cast<int>(threadIdx.x) - kStepThreads};
      stream.run();
    }
  }
#endif
}

int64_t align32(int64_t words) { return ceil_div<int64_t>(words, 32) * 32; }

int max_splits(int num_rows, int num_kv_heads) {
  const int splits = kExpectedCtas / (num_rows * num_kv_heads);
  return splits < 1 ? 1 : splits < kMaxContextSplits ? splits : kMaxContextSplits;
}

Exchange exchange_of(int num_rows, const LlamaShape& shape) {
  const int64_t splits = max_splits(num_rows, shape.num_kv_heads);
  const int64_t rows = num_rows;
  Exchange e{};
  e.parts = e.qkv + align32(rows * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim / 2);
  e.attention = e.parts + align32(splits > 1 ? splits * rows * shape.num_heads * (shape.head_dim / 2 + 4) : 0);
  e.middle = e.attention + align32(rows * shape.num_heads * shape.head_dim / 2);
  e.activation = e.middle + align32(rows * shape.hidden_size / 2);
  e.hidden = e.activation + align32(rows * shape.intermediate_size / 2);
  e.layer_words = e.hidden + align32(rows * shape.hidden_size / 2);
  return e;
}

LinearShape linear_shape(int out_features, int in_features, int num_ctas) {
  const int num_strips = ceil_div(in_features, kStrip);
  const int strip = ceil_div(ceil_div(in_features, num_strips), kChunk) * kChunk;
  const int num_tiles = ceil_div(out_features, kTileRows);
  return {out_features, in_features, num_strips, strip, num_tiles / num_ctas, num_tiles % num_ctas};
}

// All CTAs, one per SM, are resident at once: they wait for each other.
template <typename Arguments>
cudaError_t launch_resident(void (*kernel)(Arguments), int shared_bytes, cudaStream_t stream,
                            const std::remove_const_t<Arguments>& arguments) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  int resident = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kCtaThreads, shared_bytes);
  if (error != cudaSuccess) return error;
  if (resident < 1) return cudaErrorInvalidValue;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = device_attribute(cudaDevAttrMultiProcessorCount, 1);
  config.blockDim = kCtaThreads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace

cudaError_t decode_step(float* logits, int32_t* sampled, int32_t* last_tokens, int32_t* next_positions,
                        int32_t* context_lens, void* kv_cache, int32_t* workspace, int64_t workspace_words,
                        int64_t* times, const LlamaWeights& weights, const LlamaShape& shape, const float* rope_table,
                        const int32_t* rows, const int32_t* block_table, const float* temperature,
                        const int64_t* seeds, int table_stride, int num_rows, int num_blocks, int block_size, float eps,
                        float scale, int num_stages, Dtype dtype, cudaStream_t stream) {
  const int max_stages = kStagesPerLayer * shape.num_layers + 1;
  const bool supported =
      num_rows >= 1 && num_rows <= kMaxStepRows && shape.num_layers >= 1 && shape.num_layers <= kMaxStepLayers &&
      shape.num_heads > 0 && shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0 &&
      shape.hidden_size > 0 && shape.hidden_size % 8 == 0 && shape.hidden_size <= kMaxNormStrips * kStrip &&
      shape.intermediate_size > 0 && shape.intermediate_size % 8 == 0 && shape.vocab_size > 0 &&
      shape.vocab_size <= kMaxVocab && block_size > 0 && block_size <= kMaxBlockSize && num_stages >= 0 &&
      num_stages <= max_stages;
  if (!supported) return cudaErrorInvalidValue;
  const Exchange exchange = exchange_of(num_rows, shape);
  const int64_t set_words = (workspace_words - kHeaderWords) / 2 / 32 * 32;
  if (exchange.layer_words * shape.num_layers > set_words) return cudaErrorInvalidValue;
  return dispatch_dtype(dtype, [&](auto type) {
    return dispatch_head_dim(shape.head_dim, [&](auto dim) {
      return dispatch_int<1, 2>(ceil_div(num_rows, 4), [&](auto groups) {
        return dispatch_int<1, 2>(ceil_div(shape.hidden_size, kStrip), [&](auto strips) {
          using T = typename decltype(type)::type;
          if (device_attribute(cudaDevAttrComputeCapabilityMajor, 0) < 9) return cudaErrorNotSupported;
          const int floats = 2 * round_floats<dim()>(num_rows, shape.num_heads / shape.num_kv_heads);
          const int rest = static_cast<int>(sizeof(StepShared)) + 4 * floats;
          const int fitting = (device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, 0) - rest) / kTileBytes;
          const int ring_tiles = fitting < kMaxRingTiles ? fitting : kMaxRingTiles;
          if (ring_tiles < 2) return cudaErrorInvalidValue;
          StepArguments<T> a{};
          a.logits = logits;
          a.kv_cache = static_cast<T*>(kv_cache);
          a.workspace = reinterpret_cast<uint32_t*>(workspace);
          a.times = times;
          a.embed = static_cast<const T*>(weights.embed);
          a.final_norm = static_cast<const T*>(weights.final_norm);
          a.lm_head = static_cast<const T*>(weights.lm_head);
          a.rope_table = rope_table;
          a.sampled = sampled;
          a.last_tokens = last_tokens;
          a.next_positions = next_positions;
          a.context_lens = context_lens;
          a.temperature = temperature;
          a.seeds = seeds;
          a.rows = rows;
          a.block_table = block_table;
          a.kv_layer_elements = static_cast<int64_t>(num_blocks) * shape.num_kv_heads * 2 * block_size * dim();
          a.set_words = set_words;
          a.exchange = exchange;
          a.num_rows = num_rows;
          a.num_layers = shape.num_layers;
          a.hidden_size = shape.hidden_size;
          a.intermediate_size = shape.intermediate_size;
          a.vocab_size = shape.vocab_size;
          a.num_heads = shape.num_heads;
          a.num_kv_heads = shape.num_kv_heads;
          a.block_size = block_size;
          a.table_stride = table_stride;
          a.max_splits = max_splits(num_rows, shape.num_kv_heads);
          a.num_stages = num_stages;
          a.ring_tiles = ring_tiles;
          a.eps = eps;
          a.scale = scale;
          a.inverse_hidden_size = 1.0f / static_cast<float>(shape.hidden_size);
          a.group_heads = shape.num_heads / shape.num_kv_heads;
          const int num_ctas = device_attribute(cudaDevAttrMultiProcessorCount, 1);
          a.ctas = Divisor(num_ctas);
          a.by_rows = Divisor(num_rows);
          a.by_kv_heads = Divisor(shape.num_kv_heads);
          a.by_head_parts = Divisor(ceil_div(a.group_heads, kHeadRows));
          a.by_block_size = Divisor(block_size);
          const int width = shape.num_heads * dim();
          a.shapes[kQkv] = linear_shape(width + 2 * shape.num_kv_heads * dim(), shape.hidden_size, num_ctas);
          a.shapes[kO] = linear_shape(shape.hidden_size, width, num_ctas);
          a.shapes[kGateUp] = linear_shape(2 * shape.intermediate_size, shape.hidden_size, num_ctas);
          a.shapes[kDown] = linear_shape(shape.hidden_size, shape.intermediate_size, num_ctas);
          a.shapes[kLogits] = linear_shape(shape.vocab_size, shape.hidden_size, num_ctas);
          for (const LinearShape& l : a.shapes) {
            a.has_ends = a.has_ends || l.in_features != l.num_strips * kStrip;
          }
          for (int i = 0; i < shape.num_layers; ++i) {
            const auto pointer = [&](int j) { return static_cast<const T*>(weights.layers[6 * i + j]); };
            a.layers[i] = {pointer(0), pointer(1), pointer(2), pointer(3), pointer(4), pointer(5)};
          }
          return launch_resident(decode_step_kernel<T, dim(), groups(), strips()>, ring_tiles * kTileBytes + rest,
                                 stream, a);
        });
      });
    });
  });
}

}  // namespace tinyvllm
