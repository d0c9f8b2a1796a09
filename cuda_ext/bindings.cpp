// CUDA implementations of the ops that tinyvllm_cli/ops.py declares: check the arguments, unpack, launch.
//
// The only file with torch headers, as thin as they come: the heavy ones make a build ten times longer.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "call.h"
#include "launch.h"

namespace tinyvllm {
namespace {

constexpr auto kInt = ScalarType::Int;
constexpr auto kLong = ScalarType::Long;
constexpr auto kFloat = ScalarType::Float;
constexpr int kPartInts = 8;  // of a part of decode attention

int32_t* ints(const Tensor& t) { return static_cast<int32_t*>(t.data_ptr()); }
float* floats(const Tensor& t) { return static_cast<float*>(t.data_ptr()); }

// The sizes of one layer's cache [num_blocks, num_kv_heads, 2, block_size, head_dim].
struct Cache {
  Cache(const Call& call, const Tensor& kv_cache, ScalarType dtype) {
    call.check("kv_cache", kv_cache, dtype, {-1, -1, 2, -1, -1});
    num_kv_heads = call.fits_int("number of kv heads", kv_cache.size(1));
    block_size = call.fits_int("block size", kv_cache.size(3));
    head_dim = call.fits_int("head_dim", kv_cache.size(4));
    call.require(head_dim == 64 || head_dim == 128, "head_dim of kv_cache", "must be 64 or 128", head_dim);
    call.require(num_kv_heads > 0 && block_size > 0, "block size of kv_cache", "must be positive", block_size);
  }

  // The number of query heads in rows of this width.
  int query_heads(const Call& call, int64_t width) const {
    call.require(width > 0 && width % (static_cast<int64_t>(num_kv_heads) * head_dim) == 0, "width of out",
                 "must be a multiple of kv heads times head_dim", width);
    return call.fits_int("number of heads", width / head_dim);
  }

  // The width of k and v together.
  int64_t kv_width() const { return 2 * static_cast<int64_t>(num_kv_heads) * head_dim; }

  int num_kv_heads, block_size, head_dim;
};

void embedding_op(const Tensor& out, const Tensor& weight, const Tensor& token_ids) {
  Call call("embedding", out);
  const Dtype dtype = call.activation("weight", weight);
  call.check("weight", weight, weight.scalar_type(), {-1, -1});
  call.check("token_ids", token_ids, kInt, {-1});
  call.check("out", out, weight.scalar_type(), {token_ids.size(0), weight.size(1)});
  if (out.numel() == 0) return;
  call.launched(embedding(out.data_ptr(), weight.data_ptr(), ints(token_ids), call.fits_int("tokens", out.size(0)),
                          call.fits_int("hidden size", out.size(1)), call.fits_int("vocabulary", weight.size(0)), dtype,
                          call.stream()));
}

void rms_norm_op(const Tensor& out, const Tensor& x, const Tensor& weight, double eps) {
  Call call("rms_norm", out);
  const Dtype dtype = call.activation("x", x);
  call.check("x", x, x.scalar_type(), {-1, -1});
  call.check("out", out, x.scalar_type(), {x.size(0), x.size(1)});
  call.check("weight", weight, x.scalar_type(), {x.size(1)});
  if (x.numel() == 0) return;
  call.launched(rms_norm(out.data_ptr(), x.data_ptr(), weight.data_ptr(), call.fits_int("tokens", x.size(0)),
                         call.fits_int("hidden size", x.size(1)), static_cast<float>(eps), dtype, call.stream()));
}

void add_rms_norm_op(const Tensor& out, const Tensor& residual, const Tensor& x, const Tensor& weight, double eps) {
  Call call("add_rms_norm", out);
  const Dtype dtype = call.activation("x", x);
  call.check("x", x, x.scalar_type(), {-1, -1});
  call.check("residual", residual, x.scalar_type(), {x.size(0), x.size(1)});
  call.check("out", out, x.scalar_type(), {x.size(0), x.size(1)});
  call.check("weight", weight, x.scalar_type(), {x.size(1)});
  if (x.numel() == 0) return;
  call.launched(add_rms_norm(out.data_ptr(), residual.data_ptr(), x.data_ptr(), weight.data_ptr(),
                             call.fits_int("tokens", x.size(0)), call.fits_int("hidden size", x.size(1)),
                             static_cast<float>(eps), dtype, call.stream()));
}

void rope_store_op(const Tensor& qkv, const Tensor& kv_cache, const Tensor& rope_table, const Tensor& positions,
                   const Tensor& slots) {
  Call call("rope_store", qkv);
  const Dtype dtype = call.activation("qkv", qkv);
  const Cache cache(call, kv_cache, qkv.scalar_type());
  call.check("positions", positions, kInt, {-1});
  call.check("slots", slots, kInt, {positions.size(0)});
  call.check("rope_table", rope_table, kFloat, {-1, cache.head_dim});
  call.check("qkv", qkv, qkv.scalar_type(), {positions.size(0), -1});
  call.require(qkv.size(1) > cache.kv_width(), "width of qkv", "must exceed that of k and v", qkv.size(1));
  const int num_heads = cache.query_heads(call, qkv.size(1) - cache.kv_width());
  if (qkv.numel() == 0) return;
  call.launched(rope_store(qkv.data_ptr(), kv_cache.data_ptr(), floats(rope_table), ints(positions), ints(slots),
                           call.fits_int("tokens", qkv.size(0)), num_heads, cache.num_kv_heads, cache.head_dim,
                           cache.block_size, dtype, call.stream()));
}

void silu_mul_op(const Tensor& out, const Tensor& gate_up) {
  Call call("silu_mul", out);
  const Dtype dtype = call.activation("gate_up", gate_up);
  call.check("out", out, gate_up.scalar_type(), {-1, -1});
  call.check("gate_up", gate_up, gate_up.scalar_type(), {out.size(0), 2 * out.size(1)});
  if (out.numel() == 0) return;
  call.launched(silu_mul(out.data_ptr(), gate_up.data_ptr(), call.fits_int("tokens", out.size(0)),
                         call.fits_int("intermediate size", out.size(1)), dtype, call.stream()));
}

void decode_inputs_op(const Tensor& token_ids, const Tensor& context_lens, const Tensor& next_positions,
                      const Tensor& last_tokens, const Tensor& rows) {
  Call call("decode_inputs", token_ids);
  call.check("rows", rows, kInt, {-1});
  const int64_t num_seqs = rows.size(0);
  call.check("token_ids", token_ids, kInt, {num_seqs});
  call.check("context_lens", context_lens, kInt, {num_seqs});
  call.check("next_positions", next_positions, kInt, {num_seqs});
  call.check("last_tokens", last_tokens, kInt, {-1});
  if (num_seqs == 0) return;
  call.launched(decode_inputs(ints(token_ids), ints(context_lens), ints(next_positions), ints(last_tokens), ints(rows),
                              call.fits_int("sequences", num_seqs), call.stream()));
}

void decode_parts_op(const Tensor& parts, const Tensor& rows, const Tensor& context_lens, int64_t num_heads,
                     int64_t num_kv_heads, int64_t head_dim, int64_t num_splits, int64_t min_warps) {
  Call call("decode_parts", parts);
  call.check("rows", rows, kInt, {-1});
  call.check("context_lens", context_lens, kInt, {rows.size(0)});
  call.require(num_splits > 0, "num_splits", "must be positive", num_splits);
  call.check_scratch("parts", parts, kInt, rows.size(0) * num_splits * kPartInts);
  if (rows.numel() == 0) return;
  call.launched(decode_parts(ints(parts), ints(rows), ints(context_lens), call.fits_int("sequences", rows.size(0)),
                             call.fits_int("num_heads", num_heads), call.fits_int("num_kv_heads", num_kv_heads),
                             call.fits_int("head_dim", head_dim), call.fits_int("num_splits", num_splits),
                             call.fits_int("min_warps", min_warps), call.stream()));
}

void attention_decode_op(const Tensor& out, const Tensor& qkv, const Tensor& kv_cache, const Tensor& rope_table,
                         const Tensor& block_table, const Tensor& parts, const Tensor& workspace, int64_t num_splits,
                         int64_t min_warps, double scale) {
  Call call("attention_decode", out);
  const Dtype dtype = call.activation("qkv", qkv);
  const Cache cache(call, kv_cache, qkv.scalar_type());
  call.check("block_table", block_table, kInt, {-1, -1});
  call.check("rope_table", rope_table, kFloat, {-1, cache.head_dim});
  call.check("out", out, qkv.scalar_type(), {-1, -1});
  const int64_t num_seqs = out.size(0);
  call.check("qkv", qkv, qkv.scalar_type(), {num_seqs, out.size(1) + cache.kv_width()});
  call.require(num_splits > 0, "num_splits", "must be positive", num_splits);
  const int num_heads = cache.query_heads(call, out.size(1));
  call.check_scratch("parts", parts, kInt, num_seqs * num_splits * kPartInts);
  call.check_scratch("workspace", workspace, kFloat, 4 + num_seqs * num_heads * num_splits * (cache.head_dim + 4));
  if (num_seqs == 0) return;
  call.launched(attention_decode(out.data_ptr(), qkv.data_ptr(), kv_cache.data_ptr(), floats(rope_table),
                                 ints(block_table), call.fits_int("width of block_table", block_table.size(1)),
                                 ints(parts), floats(workspace), call.fits_int("sequences", num_seqs),
                                 num_heads, cache.num_kv_heads, cache.head_dim, cache.block_size,
                                 call.fits_int("num_splits", num_splits), call.fits_int("min_warps", min_warps),
                                 static_cast<float>(scale), dtype, call.stream()));
}

void attention_prefill_op(const Tensor& out, const Tensor& q, const Tensor& kv_cache, const Tensor& block_table,
                          const Tensor& rows, const Tensor& query_start, const Tensor& context_lens,
                          int64_t max_query_len, double scale) {
  Call call("attention_prefill", out);
  const Dtype dtype = call.activation("q", q);
  const Cache cache(call, kv_cache, q.scalar_type());
  call.check("rows", rows, kInt, {-1});
  const int64_t num_seqs = rows.size(0);
  call.check("context_lens", context_lens, kInt, {num_seqs});
  call.check("query_start", query_start, kInt, {num_seqs + 1});
  call.check("block_table", block_table, kInt, {-1, -1});
  call.check("out", out, q.scalar_type(), {-1, -1});
  call.check_rows("q", q, q.scalar_type(), out.size(1));
  call.require(q.size(0) == out.size(0), "q", "must have as many rows as out", q.size(0));
  const int num_heads = cache.query_heads(call, out.size(1));
  if (num_seqs == 0 || out.size(0) == 0) return;
  call.require(max_query_len > 0, "max_query_len", "must be positive", max_query_len);
  call.launched(attention_prefill(out.data_ptr(), q.data_ptr(), q.stride(0), kv_cache.data_ptr(), ints(block_table),
                                  call.fits_int("width of block_table", block_table.size(1)), ints(rows),
                                  ints(query_start), ints(context_lens), call.fits_int("sequences", num_seqs),
                                  call.fits_int("max_query_len", max_query_len), num_heads, cache.num_kv_heads,
                                  cache.head_dim, cache.block_size, static_cast<float>(scale), dtype, call.stream()));
}

void sample_op(const Tensor& sampled, const Tensor& last_tokens, const Tensor& logits, const Tensor& rows,
               const Tensor& positions, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
               const Tensor& min_p, const Tensor& seeds, const Tensor& workspace, const Tensor& counters) {
  Call call("sample", sampled);
  call.check("logits", logits, kFloat, {-1, -1});
  const int64_t num_rows = logits.size(0);
  call.check("sampled", sampled, kInt, {num_rows});
  call.check("rows", rows, kInt, {num_rows});
  call.check("positions", positions, kInt, {num_rows});
  call.check("last_tokens", last_tokens, kInt, {-1});
  const int64_t max_num_seqs = last_tokens.size(0);
  call.check("temperature", temperature, kFloat, {max_num_seqs});
  call.check("top_k", top_k, kInt, {max_num_seqs});
  call.check("top_p", top_p, kFloat, {max_num_seqs});
  call.check("min_p", min_p, kFloat, {max_num_seqs});
  call.check("seeds", seeds, kLong, {max_num_seqs});
  call.check_scratch("workspace", workspace, kFloat, num_rows * sample_workspace_floats());
  call.check_scratch("counters", counters, kInt, num_rows);
  if (num_rows == 0) return;
  call.launched(sample(ints(sampled), ints(last_tokens), floats(logits), ints(rows), ints(positions),
                       floats(temperature), ints(top_k), floats(top_p), floats(min_p),
                       static_cast<int64_t*>(seeds.data_ptr()), floats(workspace), ints(counters),
                       call.fits_int("rows", num_rows), call.fits_int("vocabulary", logits.size(1)), call.stream()));
}

void penalize_op(const Tensor& logits, const Tensor& counts, const Tensor& rows, const Tensor& repetition,
                 const Tensor& presence, const Tensor& frequency) {
  Call call("penalize", logits);
  call.check("logits", logits, kFloat, {-1, -1});
  call.check("rows", rows, kInt, {logits.size(0)});
  call.check("counts", counts, kInt, {-1, logits.size(1)});
  call.check("repetition", repetition, kFloat, {counts.size(0)});
  call.check("presence", presence, kFloat, {counts.size(0)});
  call.check("frequency", frequency, kFloat, {counts.size(0)});
  if (logits.numel() == 0) return;
  call.launched(penalize(floats(logits), ints(counts), ints(rows), floats(repetition), floats(presence),
                         floats(frequency), call.fits_int("rows", logits.size(0)),
                         call.fits_int("vocabulary", logits.size(1)), call.stream()));
}

void count_tokens_op(const Tensor& counts, const Tensor& sampled, const Tensor& rows) {
  Call call("count_tokens", counts);
  call.check("counts", counts, kInt, {-1, -1});
  call.check("rows", rows, kInt, {-1});
  call.check("sampled", sampled, kInt, {rows.size(0)});
  if (rows.numel() == 0) return;
  call.launched(count_tokens(ints(counts), ints(sampled), ints(rows), call.fits_int("rows", rows.size(0)),
                             call.fits_int("vocabulary", counts.size(1)), call.stream()));
}

void logprobs_op(const Tensor& values, const Tensor& token_ids, const Tensor& logits, const Tensor& sampled,
                 const Tensor& rows, const Tensor& num_logprobs) {
  Call call("logprobs", values);
  call.check("values", values, kFloat, {-1, -1});
  call.check("token_ids", token_ids, kInt, {values.size(0), values.size(1)});
  call.check("logits", logits, kFloat, {values.size(0), -1});
  call.check("sampled", sampled, kInt, {values.size(0)});
  call.check("rows", rows, kInt, {values.size(0)});
  call.check("num_logprobs", num_logprobs, kInt, {-1});
  if (logits.numel() == 0) return;
  call.launched(logprobs(floats(values), ints(token_ids), floats(logits), ints(sampled), ints(rows),
                         ints(num_logprobs), call.fits_int("rows", values.size(0)),
                         call.fits_int("width", values.size(1)), call.fits_int("vocabulary", logits.size(1)),
                         call.stream()));
}

}  // namespace
}  // namespace tinyvllm

#include "decode_step_op.h"
#include "linear_op.h"

TORCH_LIBRARY_IMPL(tinyvllm, CUDA, m) {
  m.impl("embedding", tinyvllm::embedding_op);
  m.impl("rms_norm", tinyvllm::rms_norm_op);
  m.impl("add_rms_norm", tinyvllm::add_rms_norm_op);
  m.impl("rope_store", tinyvllm::rope_store_op);
  m.impl("silu_mul", tinyvllm::silu_mul_op);
  m.impl("matvec", tinyvllm::matvec_op);
  m.impl("linear_hopper", tinyvllm::linear_hopper_op);
  m.impl("add_linear_hopper", tinyvllm::add_linear_hopper_op);
  m.impl("gated_linear_hopper", tinyvllm::gated_linear_hopper_op);
  m.impl("gated_linear_wide", tinyvllm::gated_linear_wide_op);
  m.impl("linear_wide", tinyvllm::linear_wide_op);
  m.impl("add_linear_wide", tinyvllm::add_linear_wide_op);
  m.impl("argmax_linear_hopper", tinyvllm::argmax_linear_hopper_op);
  m.impl("decode_inputs", tinyvllm::decode_inputs_op);
  m.impl("decode_parts", tinyvllm::decode_parts_op);
  m.impl("attention_decode", tinyvllm::attention_decode_op);
  m.impl("attention_prefill", tinyvllm::attention_prefill_op);
  m.impl("sample", tinyvllm::sample_op);
  m.impl("penalize", tinyvllm::penalize_op);
  m.impl("count_tokens", tinyvllm::count_tokens_op);
  m.impl("logprobs", tinyvllm::logprobs_op);
  m.impl("decode_step", tinyvllm::decode_step_op);
}
