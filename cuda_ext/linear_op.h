// The ops that multiply by a matrix of weights: their arguments checked. Part of bindings.cpp, which alone includes it.
#pragma once

namespace tinyvllm {
namespace {

// x [T, in] and weight [rows * N, in] to out [T, N] of x's dtype, or fp32.
struct Product {
  Product(const Call& call, int64_t rows, const Tensor& out, const Tensor& x, const Tensor& weight,
          bool may_be_float = false, const char* name = "out")
      : dtype(call.activation("x", x)) {
    call.check("x", x, x.scalar_type(), {-1, -1});
    const bool is_float = may_be_float && out.scalar_type() == kFloat;
    call.check(name, out, is_float ? kFloat : x.scalar_type(), {x.size(0), -1});
    call.check("weight", weight, x.scalar_type(), {rows * out.size(1), x.size(1)});
    out_dtype = is_float ? Dtype::kF32 : dtype;
    num_rows = call.fits_int("rows", x.size(0));
    out_features = call.fits_int("out features", out.size(1));
    in_features = call.fits_int("in features", x.size(1));
  }

  Dtype dtype, out_dtype;
  int num_rows, out_features, in_features;
};

int64_t* sums_of(const Call& call, const char* name, const std::optional<Tensor>& sums, int64_t num_rows) {
  if (!sums) return nullptr;
  call.check_scratch(name, *sums, kLong, num_rows);
  return static_cast<int64_t*>(sums->data_ptr());
}

void matvec_op(const Tensor& out, const Tensor& x, const Tensor& weight) {
  Call call("matvec", out);
  const Product p(call, 1, out, x, weight, true);
  if (out.numel() == 0) return;
  call.launched(matvec(out.data_ptr(), x.data_ptr(), weight.data_ptr(), p.num_rows, p.out_features, p.in_features,
                       p.dtype, p.out_dtype, call.stream()));
}

void linear_hopper_op(const Tensor& out, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& sums,
                      double eps) {
  Call call("linear_hopper", out);
  const Product p(call, 1, out, x, weight, true);
  const int64_t* rows = sums_of(call, "sums", sums, p.num_rows);
  if (out.numel() == 0) return;
  call.launched(linear_hopper(out.data_ptr(), x.data_ptr(), weight.data_ptr(), rows, p.num_rows, p.out_features,
                              p.in_features, static_cast<float>(eps), p.dtype, p.out_dtype, call.stream()));
}

using LinearLauncher = decltype(linear_wide);

void linear_of_dtype_op(const char* op, LinearLauncher launcher, int64_t rows, const Tensor& out, const Tensor& x,
                        const Tensor& weight, const std::optional<Tensor>& sums, double eps) {
  Call call(op, out);
  const Product p(call, rows, out, x, weight);
  const int64_t* of_rows = sums_of(call, "sums", sums, p.num_rows);
  if (out.numel() == 0) return;
  call.launched(launcher(out.data_ptr(), x.data_ptr(), weight.data_ptr(), of_rows, p.num_rows, p.out_features,
                         p.in_features, static_cast<float>(eps), p.dtype, call.stream()));
}

void gated_linear_hopper_op(const Tensor& out, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& sums,
                            double eps) {
  linear_of_dtype_op("gated_linear_hopper", gated_linear_hopper, 2, out, x, weight, sums, eps);
}

void gated_linear_wide_op(const Tensor& out, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& sums,
                          double eps) {
  linear_of_dtype_op("gated_linear_wide", gated_linear_wide, 2, out, x, weight, sums, eps);
}

void linear_wide_op(const Tensor& out, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& sums,
                    double eps) {
  linear_of_dtype_op("linear_wide", linear_wide, 1, out, x, weight, sums, eps);
}

using AddLauncher = decltype(add_linear_hopper);

void add_linear_op(const char* op, AddLauncher launcher, const Tensor& residual, const std::optional<Tensor>& scaled,
                   const std::optional<Tensor>& sums, const std::optional<Tensor>& other_sums, const Tensor& x,
                   const Tensor& weight, const std::optional<Tensor>& norm) {
  Call call(op, residual);
  const Product p(call, 1, residual, x, weight, false, "residual");
  call.require(scaled.has_value() == sums.has_value() && scaled.has_value() == norm.has_value(), "scaled, sums and norm",
               "must be given together", scaled.has_value());
  if (scaled) {
    call.check("scaled", *scaled, x.scalar_type(), {p.num_rows, p.out_features});
    call.check("norm", *norm, x.scalar_type(), {p.out_features});
  }
  int64_t* to = sums_of(call, "sums", sums, p.num_rows);
  int64_t* other = sums_of(call, "other_sums", other_sums, p.num_rows);
  if (residual.numel() == 0) return;
  call.launched(launcher(residual.data_ptr(), scaled ? scaled->data_ptr() : nullptr, to, other, x.data_ptr(),
                         weight.data_ptr(), norm ? norm->data_ptr() : nullptr, p.num_rows, p.out_features,
                         p.in_features, p.dtype, call.stream()));
}

void add_linear_hopper_op(const Tensor& residual, const std::optional<Tensor>& scaled,
                          const std::optional<Tensor>& sums, const std::optional<Tensor>& other_sums, const Tensor& x,
                          const Tensor& weight, const std::optional<Tensor>& norm) {
  add_linear_op("add_linear_hopper", add_linear_hopper, residual, scaled, sums, other_sums, x, weight, norm);
}

void add_linear_wide_op(const Tensor& residual, const std::optional<Tensor>& scaled, const std::optional<Tensor>& sums,
                        const std::optional<Tensor>& other_sums, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& norm) {
  add_linear_op("add_linear_wide", add_linear_wide, residual, scaled, sums, other_sums, x, weight, norm);
}

void argmax_linear_hopper_op(const Tensor& sampled, const Tensor& last_tokens, const Tensor& ranks, const Tensor& x,
                             const Tensor& weight, const Tensor& rows) {
  Call call("argmax_linear_hopper", sampled);
  const Dtype dtype = call.activation("x", x);
  call.check("x", x, x.scalar_type(), {-1, -1});
  call.check("weight", weight, x.scalar_type(), {-1, x.size(1)});
  call.check("sampled", sampled, kInt, {x.size(0)});
  call.check("rows", rows, kInt, {x.size(0)});
  call.check("last_tokens", last_tokens, kInt, {-1});
  call.check_scratch("ranks", ranks, kLong, x.size(0));
  if (sampled.numel() == 0) return;
  call.launched(argmax_linear_hopper(ints(sampled), ints(last_tokens), static_cast<int64_t*>(ranks.data_ptr()),
                                     x.data_ptr(), weight.data_ptr(), ints(rows), call.fits_int("rows", x.size(0)),
                                     call.fits_int("out features", weight.size(0)),
                                     call.fits_int("in features", x.size(1)), dtype, call.stream()));
}

}  // namespace
}  // namespace tinyvllm
