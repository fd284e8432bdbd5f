// The arithmetic of reductions: one row per rank, combined element by element in rank order.
//
// ((row 0 + row 1) + row 2) + … in float32, in float64 when rows or result are float64, in int64 for integers; then the
// average's division, then the factor, then one rounding to the result's dtype. Each element depends on nothing but the
// same element of the rows, so the bits do not depend on how a buffer is cut.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "neap/comm/group.h"

namespace neap::comm::internal {

struct RowReduction {
  at::ScalarType rows = at::kFloat;
  at::ScalarType result = at::kFloat;
  Reduction reduction;
  int ranks = 1;

  // UserError when it is not defined for these dtypes. `what` begins the text.
  void check(const char* what) const;
};

// `result` may be one of the rows, when the dtypes agree. REQUIRES: check() passed; rows.size() == ranks.
void reduce_rows(const RowReduction& how, std::span<const std::byte* const> rows, std::byte* result, int64_t elements);

}  // namespace neap::comm::internal
