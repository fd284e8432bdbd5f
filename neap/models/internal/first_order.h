// Guard of the functions whose backward is written by hand and builds no graph of its own.
#pragma once

#include <ATen/core/grad_mode.h>

#include "neap/base/error.h"

namespace neap::models::internal {

// In a backward: a graph of the gradient would silently miss terms, so it is refused.
inline void require_first_order(const char* function) {
  NEAP_CHECK(!at::GradMode::is_enabled(), "[models] ", function,
             " computes gradients of first order; a graph of its gradient (create_graph) was asked for; use the "
             "composition of torch operators for higher orders");
}

}  // namespace neap::models::internal
