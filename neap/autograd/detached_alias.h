// What tensor.detach() gives, without the dispatcher: shares memory and version counter, has no history.
//
// For hook objects, which must not hold the tensor that they are given (see saved_tensor_scope.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace neap::autograd {

inline at::Tensor detached_alias(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

}  // namespace neap::autograd
