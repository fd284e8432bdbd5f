// A tensor that the first run of a region saved, by everything but its values; and how a second run is held against it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <string>
#include <vector>

#include "neap/autograd/version_stamp.h"

namespace neap::recompute::internal {

// What the first run left.
struct SavedTensor {
  SavedTensor(const at::Tensor& tensor, bool with_value);

  c10::SmallVector<int64_t, 5> sizes;
  c10::TensorOptions options;  // dtype, device, layout
  autograd::VersionStamp version;
  at::Tensor value;  // a copy; debug mode only
  std::string op;    // the operator that saved it; debug mode only

  std::string describe() const;  // "CPUFloatType [2, 3]"
};

// What the second run came up with.
struct Captured {
  Captured() = default;
  explicit Captured(const at::Tensor& tensor);

  at::Tensor tensor;               // detached; undefined once it was handed over or is not needed any more
  autograd::VersionStamp version;  // it may alias memory that the region changes later on
};

// UserError that names the region, the first tensor that differs, and what usually causes it. `surplus` counts the
// tensors that the second run saved beyond those of the first.
void check_second_run(const std::string& region, const std::vector<SavedTensor>& first,
                      const std::vector<Captured>& second, std::size_t surplus);

}  // namespace neap::recompute::internal
