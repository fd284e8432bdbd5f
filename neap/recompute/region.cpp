#include "neap/recompute/region.h"

#include <ATen/core/grad_mode.h>

#include <memory>

#include "neap/base/error.h"
#include "neap/recompute/internal/region_state.h"

namespace neap::recompute {

TensorList region(Function fn, at::ArrayRef<at::Tensor> inputs, const RegionOptions& options) {
  NEAP_CHECK(fn != nullptr, "[recompute] unit '", options.name, "': expected a function; found none");
  if (!at::GradMode::is_enabled()) return fn(inputs);
  const auto shared = std::make_shared<internal::Shared>(options, nullptr);
  TensorList outputs;
  const auto forward = [&] { outputs = fn(inputs); };
  internal::run_region({options.name, options.devices}, shared, inputs, forward, fn);
  return outputs;
}

}  // namespace neap::recompute
