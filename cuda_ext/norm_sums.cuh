// A norm done by the products around it (launch.h has the whole): the first adds up each row's squares, the second divides
// by the root of their mean.
#pragma once

#include "common.cuh"

namespace tinyvllm {

constexpr float kSumsOfOne = 1 << 28;  // sums are int64 in units of 2^-28

// What the second product multiplies its rows by.
struct RowScale {
  const int64_t* sums;  // null: by 1
  float unit;           // 2^-28 / features: sums to means
  float eps;

  RowScale(const int64_t* of_rows, int in_features, float epsilon)
      : sums(of_rows), unit(1.0f / kSumsOfOne / static_cast<float>(in_features)), eps(epsilon) {}

  __device__ float of(int row) const {
    return sums == nullptr ? 1.0f : rsqrtf(static_cast<float>(sums[row]) * unit + eps);
  }
};

// Adds the squares of a part of a row. The sum of such integers is the same in any order.
__device__ __forceinline__ void add_squares(int64_t* sum, float squares) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum),
            static_cast<unsigned long long>(__float2ll_rn(squares * kSumsOfOne)));
}

// ---- Host ----

// What a product that adds to a residual asks of it, and of the norm behind.
inline bool can_add(const void* residual, const void* scaled, const int64_t* sums, const void* norm, int out_features) {
  const bool with_norm = scaled != nullptr;
  return out_features % 8 == 0 && is_aligned16(residual) && is_aligned16(scaled) && is_aligned16(norm) &&
         (sums != nullptr) == with_norm && (norm != nullptr) == with_norm;
}

}  // namespace tinyvllm
