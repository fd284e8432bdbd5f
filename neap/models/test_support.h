// What the tests of this layer share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/randint.h>
#include <c10/core/TensorOptions.h>

namespace neap::models {

inline const at::TensorOptions kDouble = at::TensorOptions(at::kDouble);

struct Batch {
  at::Tensor ids = at::randint(0, 61, {2, 9}, at::kLong);
  at::Tensor labels = at::randint(0, 61, {2, 9}, at::kLong);
};

}  // namespace neap::models
