// The op decode_step: its many arguments, checked. Part of bindings.cpp, which alone includes it, behind its own ops.
#pragma once

namespace tinyvllm {
namespace {

// num_stages -1: all of them.
void decode_step_op(const Tensor& logits, const Tensor& sampled, const Tensor& last_tokens,
                    const Tensor& next_positions, const Tensor& context_lens, const Tensor& kv_cache,
                    const Tensor& workspace, const Tensor& embed, at::TensorList layers, const Tensor& final_norm,
                    const Tensor& lm_head, const Tensor& rope_table, const Tensor& rows, const Tensor& block_table,
                    const std::optional<Tensor>& temperature, const std::optional<Tensor>& seeds, double eps,
                    double scale, int64_t num_stages, const std::optional<Tensor>& times) {
  Call call("decode_step", logits);
  const Dtype dtype = call.activation("embed", embed);
  const ScalarType type = embed.scalar_type();
  call.check("kv_cache", kv_cache, type, {-1, -1, -1, 2, -1, -1});
  call.require(layers.size() > 0 && static_cast<int64_t>(layers.size()) == 6 * kv_cache.size(0), "number of layers'",
               "must be 6 tensors for each layer of kv_cache", layers.size());
  LlamaShape shape{};
  shape.num_layers = call.fits_int("layers", kv_cache.size(0));
  shape.num_kv_heads = call.fits_int("number of kv heads", kv_cache.size(2));
  shape.head_dim = call.fits_int("head_dim", kv_cache.size(5));
  const int block_size = call.fits_int("block size", kv_cache.size(4));
  call.check("embed", embed, type, {-1, -1});
  call.check("rows", rows, kInt, {-1});
  const int64_t num_rows = rows.size(0), hidden = embed.size(1), head_dim = shape.head_dim;
  call.require(num_rows >= 1 && head_dim > 0 && shape.num_kv_heads > 0, "number of rows", "must be positive", num_rows);
  call.require(layers[2].dim() == 2 && layers[4].dim() == 2 && layers[2].size(1) % head_dim == 0, "o and gate_up",
               "must be matrices of whole heads, they have so many dimensions", layers[2].dim());
  const int64_t width = layers[2].size(1), intermediate = layers[4].size(0) / 2;
  shape.hidden_size = call.fits_int("hidden size", hidden);
  shape.num_heads = call.fits_int("number of heads", width / head_dim);
  shape.intermediate_size = call.fits_int("intermediate size", intermediate);
  shape.vocab_size = call.fits_int("vocabulary", embed.size(0));
  std::vector<const void*> pointers;
  for (size_t i = 0; i < layers.size(); i += 6) {
    call.check("attn_norm", layers[i], type, {hidden});
    call.check("qkv", layers[i + 1], type, {width + 2 * shape.num_kv_heads * head_dim, hidden});
    call.check("o", layers[i + 2], type, {hidden, width});
    call.check("mlp_norm", layers[i + 3], type, {hidden});
    call.check("gate_up", layers[i + 4], type, {2 * intermediate, hidden});
    call.check("down", layers[i + 5], type, {hidden, intermediate});
    for (size_t j = i; j < i + 6; ++j) pointers.push_back(layers[j].data_ptr());
  }
  call.check("final_norm", final_norm, type, {hidden});
  call.check("lm_head", lm_head, type, {embed.size(0), hidden});
  call.check("logits", logits, kFloat, {num_rows, embed.size(0)});
  call.check("rope_table", rope_table, kFloat, {-1, head_dim});
  call.check("sampled", sampled, kInt, {num_rows});
  call.check("next_positions", next_positions, kInt, {num_rows});
  call.check("context_lens", context_lens, kInt, {num_rows});
  call.check("block_table", block_table, kInt, {-1, -1});
  call.check("last_tokens", last_tokens, kInt, {block_table.size(0)});
  call.check_scratch("workspace", workspace, kInt, 64);
  call.require(temperature.has_value() == seeds.has_value(), "temperature and seeds", "must come together, seeds are",
               seeds.has_value());
  if (temperature) call.check("temperature", *temperature, kFloat, {block_table.size(0)});
  if (seeds) call.check("seeds", *seeds, kLong, {block_table.size(0)});
  const int64_t all_stages = 5 * static_cast<int64_t>(shape.num_layers) + 1;
  const int64_t stages = num_stages < 0 ? all_stages : num_stages;
  if (times) call.check("times", *times, kLong, {-1, stages, 2});
  const LlamaWeights weights{embed.data_ptr(), pointers.data(), final_norm.data_ptr(), lm_head.data_ptr()};
  call.launched(decode_step(
      floats(logits), ints(sampled), ints(last_tokens), ints(next_positions), ints(context_lens), kv_cache.data_ptr(),
      ints(workspace), workspace.numel(), times ? static_cast<int64_t*>(times->data_ptr()) : nullptr, weights, shape,
      floats(rope_table), ints(rows), ints(block_table), temperature ? floats(*temperature) : nullptr,
      seeds ? static_cast<const int64_t*>(seeds->data_ptr()) : nullptr,
      call.fits_int("width of block_table", block_table.size(1)), call.fits_int("rows", num_rows),
      call.fits_int("blocks", kv_cache.size(1)), block_size, static_cast<float>(eps), static_cast<float>(scale),
      call.fits_int("num_stages", stages), dtype, call.stream()));
}

}  // namespace
}  // namespace tinyvllm
