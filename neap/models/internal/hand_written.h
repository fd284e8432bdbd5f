// What the functions whose backward is written by hand have in common.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include "neap/base/error.h"

namespace neap::models::internal {

// In a backward: a graph of the gradient would silently miss terms, so it is refused.
inline void require_first_order(const char* function) {
  NEAP_CHECK(!at::GradMode::is_enabled(), "[models] ", function,
             " computes gradients of first order; a graph of its gradient (create_graph) was asked for; use the "
             "composition of torch operators for higher orders");
}

// The dtype in which sums are made: float32 at least.
inline c10::ScalarType wide_type(c10::ScalarType type) { return type == c10::kDouble ? c10::kDouble : c10::kFloat; }

}  // namespace neap::models::internal
