#include "neap/comm/internal/reduce_rows.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

#include "neap/base/error.h"

namespace neap::comm::internal {
namespace {

constexpr int64_t kBlock = 2048;  // elements; the accumulator stays in the first-level cache

template <class T>
struct Type {
  using type = T;
};

bool is_integer(at::ScalarType type) { return type == at::kInt || type == at::kLong; }

template <class Function>
void with_float_type(at::ScalarType type, Function function) {
  switch (type) {
    case at::kFloat:
      return function(Type<float>());
    case at::kDouble:
      return function(Type<double>());
    case at::kBFloat16:
      return function(Type<c10::BFloat16>());
    case at::kHalf:
      return function(Type<c10::Half>());
    default:
      NEAP_ASSERT(false, "reduction of ", c10::toString(type));
  }
}

template <class Acc, class Row>
void combine(Acc* acc, const Row* row, int64_t n, bool first, ReduceOp op) {
  if (first) {
    for (int64_t i = 0; i < n; ++i) acc[i] = static_cast<Acc>(row[i]);
  } else if (op == ReduceOp::kMax) {
    for (int64_t i = 0; i < n; ++i) {
      const Acc value = static_cast<Acc>(row[i]);
      acc[i] = value > acc[i] || value != value ? value : acc[i];
    }
  } else if constexpr (std::is_integral_v<Acc>) {
    // Wraps, as tensors' sums do.
    for (int64_t i = 0; i < n; ++i)
      acc[i] = static_cast<Acc>(static_cast<uint64_t>(acc[i]) + static_cast<uint64_t>(static_cast<Acc>(row[i])));
  } else {
    for (int64_t i = 0; i < n; ++i) acc[i] += static_cast<Acc>(row[i]);
  }
}

template <class Acc>
void scale(Acc* acc, int64_t n, const RowReduction& how) {
  if constexpr (std::is_floating_point_v<Acc>) {
    if (how.reduction.op == ReduceOp::kAverage && how.ranks > 1)
      for (int64_t i = 0; i < n; ++i) acc[i] /= static_cast<Acc>(how.ranks);
    if (how.reduction.factor != 1)
      for (int64_t i = 0; i < n; ++i) acc[i] *= static_cast<Acc>(how.reduction.factor);
  }
}

template <class Acc, class Row, class Result>
void reduce(const RowReduction& how, std::span<const std::byte* const> rows, std::byte* result, int64_t elements) {
  alignas(64) Acc acc[kBlock];
  for (int64_t at = 0; at < elements; at += kBlock) {
    const int64_t n = std::min(kBlock, elements - at);
    for (size_t r = 0; r < rows.size(); ++r)
      combine(acc, reinterpret_cast<const Row*>(rows[r]) + at, n, r == 0, how.reduction.op);
    scale(acc, n, how);
    auto* out = reinterpret_cast<Result*>(result) + at;
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Result>(acc[i]);
  }
}

bool known(at::ScalarType type) {
  return is_integer(type) || type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

}  // namespace

void RowReduction::check(const char* what) const {
  for (const auto type : {rows, result})
    NEAP_CHECK(known(type), "[comm] ", what, " expected float32, float64, bfloat16, float16, int32 or int64; found ",
               c10::toString(type));
  if (is_integer(rows) || is_integer(result)) {
    NEAP_CHECK(rows == result, "[comm] ", what, " of integers expected a result of the same dtype; found ",
               c10::toString(rows), " and ", c10::toString(result));
    NEAP_CHECK(reduction.op != ReduceOp::kAverage && reduction.factor == 1, "[comm] ", what,
               " expected a sum or a maximum of integers, without a factor; found ",
               reduction.op == ReduceOp::kAverage ? "an average" : "a factor");
  }
  NEAP_CHECK(reduction.op != ReduceOp::kMax || reduction.factor == 1, "[comm] ", what,
             " expected no factor with a maximum; found ", reduction.factor);
}

void reduce_rows(const RowReduction& how, std::span<const std::byte* const> rows, std::byte* result, int64_t elements) {
  NEAP_ASSERT(static_cast<int>(rows.size()) == how.ranks);
  if (how.rows == at::kInt) return reduce<int64_t, int32_t, int32_t>(how, rows, result, elements);
  if (how.rows == at::kLong) return reduce<int64_t, int64_t, int64_t>(how, rows, result, elements);
  with_float_type(how.rows, [&]<class Row>(Type<Row>) {
    with_float_type(how.result, [&]<class Result>(Type<Result>) {
      using Wide = std::conditional_t<std::is_same_v<Row, double> || std::is_same_v<Result, double>, double, float>;
      reduce<Wide, Row, Result>(how, rows, result, elements);
    });
  });
}

}  // namespace neap::comm::internal
