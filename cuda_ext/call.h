// The checks of an op's arguments. Part of bindings.cpp, which alone includes it, behind torch's headers.
#pragma once

#include <initializer_list>
#include <limits>
#include <string>

#include "launch.h"

namespace tinyvllm {
namespace {

using at::ScalarType;
using at::Tensor;

// Numbers for messages. TORCH_CHECK itself is given strings only: with torch 2.11's wheel, writing a number to its stream
// from an extension ended in a segmentation fault.
std::string text(int64_t value) { return std::to_string(value); }

std::string text(at::IntArrayRef values) {
  std::string result = "[";
  for (size_t i = 0; i < values.size(); ++i) result += (i ? ", " : "") + text(values[i]);
  return result + "]";
}

// The checks of one op's call, whose tensors all live on one device. Every message begins with op and argument.
class Call {
 public:
  Call(const char* op, const Tensor& first) : op_(op), device_(cuda_device(op, first)), guard_(device_) {}

  // A contiguous tensor of exactly this dtype and shape; a size of -1 may be anything.
  void check(const char* name, const Tensor& t, ScalarType dtype, std::initializer_list<int64_t> shape) const {
    check_base(name, t, dtype, shape.size());
    int64_t dim = 0;
    for (int64_t size : shape) {
      TORCH_CHECK(size < 0 || t.size(dim) == size, op_, ": ", name, " has shape ", text(t.sizes()), ", expected size ", text(size),
                  " in dimension ", text(dim));
      ++dim;
    }
    TORCH_CHECK(t.is_contiguous(), op_, ": ", name, " must be contiguous, its strides are ", text(t.strides()));
  }

  // Rows of any stride, but contiguous and 16-byte aligned each.
  void check_rows(const char* name, const Tensor& t, ScalarType dtype, int64_t row_size) const {
    check_base(name, t, dtype, 2);
    TORCH_CHECK(t.size(1) == row_size, op_, ": ", name, " has shape ", text(t.sizes()), ", expected rows of ",
                text(row_size));
    TORCH_CHECK(t.stride(1) == 1 && t.stride(0) >= 0 && t.stride(0) * t.element_size() % 16 == 0, op_, ": ", name,
                " must have contiguous rows whose starts are 16 bytes aligned, its strides are ", text(t.strides()));
  }

  // A contiguous tensor of any shape with at least so many elements.
  void check_scratch(const char* name, const Tensor& t, ScalarType dtype, int64_t numel) const {
    check_base(name, t, dtype, t.dim());
    TORCH_CHECK(t.numel() >= numel, op_, ": ", name, " has ", text(t.numel()), " elements, needs ", text(numel));
    TORCH_CHECK(t.is_contiguous(), op_, ": ", name, " must be contiguous, its strides are ", text(t.strides()));
  }

  // The dtype of activations and weights.
  Dtype activation(const char* name, const Tensor& t) const {
    if (t.scalar_type() == ScalarType::BFloat16) return Dtype::kBF16;
    TORCH_CHECK(t.scalar_type() == ScalarType::Half, op_, ": ", name, " is ", t.scalar_type(),
                ", expected BFloat16 or Half");
    return Dtype::kF16;
  }

  int fits_int(const char* name, int64_t value) const {
    TORCH_CHECK(value >= 0 && value <= std::numeric_limits<int>::max(), op_, ": ", name, " is ", text(value),
                ", which is out of range");
    return static_cast<int>(value);
  }

  void require(bool condition, const char* name, const char* what, int64_t value) const {
    TORCH_CHECK(condition, op_, ": ", name, " ", what, ", got ", text(value));
  }

  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream(device_.index()); }

  void launched(cudaError_t error) const {
    TORCH_CHECK(error == cudaSuccess, op_, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error),
                error == cudaErrorInvalidValue ? "): the kernel does not support these sizes or dtypes" : ")");
  }

 private:
  void check_base(const char* name, const Tensor& t, ScalarType dtype, int64_t dims) const {
    TORCH_CHECK(t.device() == device_, op_, ": ", name, " is on ", t.device(), ", expected ", device_);
    TORCH_CHECK(t.scalar_type() == dtype, op_, ": ", name, " is ", t.scalar_type(), ", expected ", dtype);
    TORCH_CHECK(t.dim() == dims, op_, ": ", name, " has shape ", text(t.sizes()), ", expected ", text(dims), " dimensions");
    TORCH_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, op_, ": ", name,
                " must start at a multiple of 16 bytes");
  }

  static c10::Device cuda_device(const char* op, const Tensor& t) {
    TORCH_CHECK(t.is_cuda(), op, ": the first tensor is on ", t.device(), ", others on a CUDA device");
    return t.device();
  }

  const char* op_;
  c10::Device device_;
  c10::cuda::CUDAGuard guard_;
};

}  // namespace
}  // namespace tinyvllm
